"""What lies on which device: a model spread over devices chunk by chunk, and for each stage all that it reads."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers.utils import logging

from .blocks import base_model_of

logger = logging.get_logger(__name__)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter lies."""
    return next(module.parameters()).device


def known_devices(names: list[str], num_chunks: int) -> list[torch.device]:
    """The devices of these names, one a chunk.

    Raises:
        ValueError: another number than that of the chunks, devices that are not there or not of one type.
    """
    if len(names) != num_chunks:
        raise ValueError(
            f"devices={names!r} are {len(names)}, and the model has {num_chunks} chunk(s): give one device a "
            "chunk (the same one may come several times), or change num_chunks or chunk_sizes."
        )
    for device in map(torch.device, names):
        if (device.index or 0) >= _count(device.type):
            raise ValueError(
                f"devices={names!r}: {device} is not there. This machine has the CPU and "
                f"{torch.cuda.device_count()} CUDA device(s)."
            )
    devices = [numbered(torch.device(name)) for name in names]
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"devices={names!r} are of several types: the chunks of one process run on the CPU, or all of them on "
            "devices of one other type. Give such devices."
        )
    return devices


def numbered(device: torch.device) -> torch.device:
    """The same device by its full name: `cuda` is the current one; the CPU has no number."""
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, _module(device.type).current_device())


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)


def _count(kind: str) -> int:
    try:
        return _module(kind).device_count()
    except RuntimeError:
        return 0


def check_offload(model: nn.Module) -> None:
    """Whether a device map has left weights outside the devices that compute.

    Raises:
        ValueError: it has; such weights cannot be trained through.
    """
    places = [str(place) for place in _device_map(model).values()]
    outside = sorted({"cpu", "disk"} & set(places)) if len(set(places)) > 1 or "disk" in places else []
    if outside or any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError(
            f"The model is offloaded ({' and '.join(outside) or 'weights on the meta device'}): its device_map found "
            "too little memory. Load it in fewer bits (dtype=torch.bfloat16, or quantised), on more devices, or give "
            "max_memory without 'cpu' to see what is missing."
        )


def check_full_evaluation(model: nn.Module, args: Any) -> None:
    """Whether Trainer would move the model to one device before an evaluation.

    Raises:
        ValueError: it would, and the model is spread over several.
    """
    asked = [name for name in ("fp16_full_eval", "bf16_full_eval") if getattr(args, name, False)]
    if asked and len({p.device for p in model.parameters()}) > 1:
        raise ValueError(
            f"{asked[0]}=True moves the whole model to one device, and it is spread over several: leave it out, and "
            "load the model in that type instead."
        )


def check_one_device(model: nn.Module) -> None:
    """Whether the model lies where the sequential runtime needs it.

    Raises:
        ValueError: it is spread over several devices.
    """
    places = {str(place) for place in _device_map(model).values()} or {str(p.device) for p in model.parameters()}
    if len(places) > 1:
        raise ValueError(
            f"The model is spread over {sorted(places)}, which runtime='sequential' cannot use: give "
            "ZeroLockTrainingArguments(runtime='concurrent'), where each chunk works on its own device, or load the "
            "model on one device."
        )


def _device_map(model: Any) -> dict[str, Any]:
    return getattr(base_model_of(model), "hf_device_map", None) or {}


def spread(
    model: nn.Module,
    blocks: nn.ModuleList,
    chunks: list[range],
    devices: list[torch.device],
    tail: Iterable[nn.Parameter],
    owner: dict[int, int],
) -> None:
    """Moves each chunk's blocks to its device; the whole model still runs, with hooks that carry its hidden states.

    What comes before the blocks goes with the first chunk, what comes after with the last. A head whose weight is
    the embeddings' stays with them.

    Args:
        devices: one a chunk.
        tail: the parameters between the last block and the logits.
        owner: for each trainable parameter's id, the chunk that trains it.

    Raises:
        ValueError: quantised weights would move, or what a chunk trains cannot lie on its device.
    """
    base = base_model_of(model)
    device_map = _map_of(base, blocks, chunks, devices, tail)
    for path, device in device_map.items():
        for name, parameter in base.get_submodule(path).named_parameters():
            _check_place(f"{path}.{name}", parameter, device, owner, devices)
    _unhook(base)
    skipped = getattr(base, "_skip_keys_device_placement", None)
    # Labels come to the main device with all inputs, and the logits that they are compared with are made on the last.
    dispatch_model(base, device_map, main_device=devices[-1], skip_keys=skipped, force_hooks=True)


def _map_of(
    base: Any, blocks: nn.ModuleList, chunks: list[range], devices: list[torch.device], tail: Iterable[nn.Parameter]
) -> dict[str, torch.device]:
    first = {id(p) for p in base.get_input_embeddings().parameters()}
    last = {id(p) for p in tail} - first
    device_map: dict[str, torch.device] = {}

    def assign(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            held = {id(p) for p in child.parameters()}
            if child is blocks:
                for chunk, device in zip(chunks, devices, strict=True):
                    device_map.update({f"{prefix}{name}.{i}": device for i in chunk})
            elif any(inner is blocks for inner in child.modules()):
                assign(child, f"{prefix}{name}.")
            else:
                device_map[prefix + name] = devices[-1] if held & last and not held & first else devices[0]

    assign(base, "")
    return device_map


def _check_place(
    name: str, parameter: nn.Parameter, device: torch.device, owner: dict[int, int], devices: list[torch.device]
) -> None:
    if _is_quantised(parameter) and parameter.device != device:
        raise ValueError(
            f"{name} is quantised and cannot be moved to {device}: load the model with a device_map, and leave "
            "devices out."
        )
    if parameter.requires_grad and devices[owner[id(parameter)]] != device:
        k = owner[id(parameter)]
        raise ValueError(
            f"{name} is trained by chunk {k + 1} on {devices[k]}, but what it belongs to lies on {device}: leave it "
            "out of target_modules and modules_to_save, or train on one device."
        )


def _is_quantised(tensor: Tensor) -> bool:
    return hasattr(tensor, "quant_state") or hasattr(tensor, "CB")


class Gathering:
    """Brings what stages read to their devices. A weight of the model is copied once for each device that lacks it.

    Args:
        model: whose weights the stages share.
        blocks: its blocks, of which copies are told apart: readouts that run through later blocks need them.
    """

    def __init__(self, model: nn.Module, blocks: nn.ModuleList):
        self._shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._inside = {id(p) for p in blocks.parameters()}
        self._copies: dict[tuple[int, torch.device], Tensor] = {}

    def gather(self, trees: Iterable[nn.Module], device: torch.device) -> dict[int, Any]:
        """Puts everything in a stage's module trees on its device, and takes the hooks of a spread model off them.

        Returns:
            What came in the place of the stage's own tensors, by the id of each.

        Raises:
            ValueError: a quantised weight would have to be copied.
        """
        own: dict[int, tuple[Tensor, Tensor]] = {}
        for tree in trees:
            _unhook(tree)
            for module in tree.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None and tensor.device != device:
                            tensors[name] = self._on(tensor, device, own)
        return {key: moved for key, (_, moved) in own.items()}

    def _on(self, tensor: Tensor, device: torch.device, own: dict[int, tuple[Tensor, Tensor]]) -> Any:
        key = (id(tensor), device)
        if id(tensor) not in self._shared:
            if id(tensor) not in own:
                own[id(tensor)] = tensor, _moved(tensor, device)
            return own[id(tensor)][1]
        if key not in self._copies:
            self._copies[key] = _moved(tensor, device).requires_grad_(False)
        return self._copies[key]

    def copies_of(self, originals: Iterable[int]) -> set[int]:
        """Ids of the copies made of these tensors of the model, which are given by their ids."""
        wanted = set(originals)
        return {id(copied) for (original, _), copied in self._copies.items() if original in wanted}

    def warn_of_blocks(self) -> None:
        """Says what it costs that a stage runs through other chunks' blocks: copies of these on its device."""
        copied = [(device, t) for (original, device), t in self._copies.items() if original in self._inside]
        by_device = groupby(sorted(copied, key=lambda pair: str(pair[0])), key=lambda pair: str(pair[0]))
        sizes = {name: sum(t.numel() * t.element_size() for _, t in pairs) for name, pairs in by_device}
        if sizes:
            told = ", ".join(f"{size:,} bytes on {name}" for name, size in sizes.items())
            logger.warning_once(
                f"Readouts (or the control) run through blocks of other chunks, with frozen copies of these: {told}. "
                "Much of what several devices save is lost. Use readout='lm_head' or a small readout_blocks (and no "
                "control) where memory is short."
            )


def _unhook(tree: nn.Module) -> None:
    for module in tree.modules():
        if "_hf_hook" in vars(module):  # a PeftModel would answer for the model inside
            remove_hook_from_module(module)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if _is_quantised(tensor):
        raise ValueError(
            f"A quantised weight {tuple(tensor.shape)} on {tensor.device} would have to be copied to {device}, where "
            "a readout runs through it: use readout='lm_head' or readout_blocks=0."
        )
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
