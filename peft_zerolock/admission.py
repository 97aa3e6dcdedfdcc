"""The admission test: whether a model can be trained chunk by chunk, found out by running it, not by its name."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from .blocks import BlockMap, UnsupportedModelError, View, base_model_of


@dataclass
class Anatomy:
    """What the admission test found out.

    Attributes:
        owner: for each trainable parameter's id, the index of the chunk that it belongs to.
        tail_parameters: the parameters between the last block and the logits, frozen or not.
    """

    owner: dict[int, int]
    tail_parameters: list[nn.Parameter]


def dry_batch(model: nn.Module) -> dict[str, Tensor]:
    """Two short rows of token ids, the second one padded at the end."""
    base = base_model_of(model)
    if getattr(base, "main_input_name", "input_ids") != "input_ids" or not hasattr(base, "get_input_embeddings"):
        raise UnsupportedModelError(model, "its input is not a sequence of token ids.")
    weight = base.get_input_embeddings().weight
    ids = torch.arange(12, device=weight.device).reshape(2, 6) % min(len(weight), 11)
    pad = getattr(base.config.get_text_config(), "pad_token_id", None)
    if pad is not None:
        ids[ids == pad] = (pad + 1) % len(weight)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    if pad is not None:
        ids[1, 4:] = pad
    return {"input_ids": ids, "attention_mask": mask}


def output_of(outputs) -> Tensor:
    """The logits, or the last hidden state of a model without a head."""
    return outputs["logits"] if "logits" in outputs else outputs[0]


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no checkpointing); afterwards each submodule has the mode that it had."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def quiet_model(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no cache and no router logits, put back afterwards."""
    config = base_model_of(model).config
    flags = {name: getattr(config, name) for name in ("use_cache", "output_router_logits") if hasattr(config, name)}
    try:
        for name in flags:
            setattr(config, name, False)
        with evaluation_mode(model):
            yield
    finally:
        for name, value in flags.items():
            setattr(config, name, value)


def leaves_behind(*tensors: Tensor) -> set[int]:
    """Ids of the leaf tensors that a backward pass from these tensors would reach; runs nothing."""
    found: set[int] = set()
    seen: set[object] = set()
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return found


def admit(blocks: BlockMap, chunks: list[range], batch: dict[str, Tensor]) -> Anatomy:
    """Runs the model whole and chunk by chunk on a dry batch, and finds which chunk each parameter belongs to.

    Must be called inside `quiet_model`.

    Raises:
        UnsupportedModelError: the chunks do not add up to the model, or a trainable parameter is not one chunk's own.
        ValueError: a new head would be neither trained nor saved.

    A model without adapters yet is only run; its parameters have no owners.
    """
    model = blocks.model
    with torch.no_grad():
        expected = output_of(model(**batch))
    views = [blocks.view(chunk) for chunk in chunks]
    try:
        with torch.enable_grad():
            left, output = _chain(views, batch)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise UnsupportedModelError(
            model, f"its blocks cannot run apart from each other ({type(error).__name__}: {error})."
        ) from error
    if output.shape != expected.shape or not torch.allclose(output, expected, rtol=1e-4, atol=1e-5):
        worst = "another shape" if output.shape != expected.shape else f"{(output - expected).abs().max():.2e} apart"
        raise UnsupportedModelError(
            model,
            f"running it chunk by chunk gives other outputs than running it whole ({worst}); its blocks share state.",
        )
    tail = _tail_parameters(blocks, left[-1].detach(), batch)
    if not isinstance(model, PeftModel):
        return Anatomy({}, tail)
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    owner: dict[int, int] = {}
    for k, tensor in enumerate([*left[:-1], output]):
        for key in leaves_behind(tensor) & set(names):
            if owner.setdefault(key, k) != k:
                raise UnsupportedModelError(
                    model,
                    f"{names[key]} would be trained by chunk {owner[key] + 1} and by chunk {k + 1} (shared or tied "
                    "weights). Take it out of target_modules, modules_to_save or trainable_token_indices.",
                )
    inside = {id(p): k for k, chunk in enumerate(chunks) for i in chunk for p in blocks.blocks[i].parameters()}
    for key in names:
        owner.setdefault(key, inside.get(key, len(chunks) - 1))
    _check_tail(model, tail)
    return Anatomy(owner, tail)


def _chain(views: list[View], batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """h_1 .. h_K, each with the graph of its own chunk alone, and the last chunk's output."""
    left: list[Tensor] = []
    for view in views:
        view.ports.received = left[-1].detach() if left else None
        output = output_of(view.module(**batch))
        if view.ports.left is None:
            raise RuntimeError("the hidden state did not reach the end of the chunk")
        left.append(view.ports.left)
        view.ports.clear()
    return left, output


def _tail_parameters(blocks: BlockMap, hidden: Tensor, batch: dict[str, Tensor]) -> list[nn.Parameter]:
    inside = {id(p) for p in blocks.blocks.parameters()}
    outside = [p for p in blocks.model.parameters() if id(p) not in inside and p.is_floating_point()]
    frozen = [p for p in outside if not p.requires_grad]
    view = blocks.view(range(0))
    view.ports.received = hidden
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            reached = leaves_behind(output_of(view.module(**batch)))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return [p for p in outside if id(p) in reached]


def _check_tail(model: nn.Module, tail: list[nn.Parameter]) -> None:
    """A head that a pretrained backbone cannot have brought along must be trained and saved (peft#2171)."""
    base = base_model_of(model)
    backbone = getattr(base, base.base_model_prefix, base)
    head = getattr(base, "get_output_embeddings", lambda: None)()
    if backbone is base or head is not None:
        return
    pretrained = {id(p) for p in backbone.parameters()}
    names = {id(p): name for name, p in base.named_parameters()}
    saved = {
        id(p) for m in base.modules() if isinstance(m, ModulesToSaveWrapper) for p in m.original_module.parameters()
    }
    left_out = [names[id(p)] for p in tail if not p.requires_grad and id(p) not in pretrained | saved]
    if left_out:
        modules = sorted({name.split(".")[0] for name in left_out})
        raise ValueError(
            f"{', '.join(left_out)} lie(s) between the backbone and the logits of {type(base).__name__} but would be "
            "neither trained nor saved: loading the adapter again would give other scores. Add "
            f"modules_to_save={modules} (with the classifier, where you set it) to the config."
        )
