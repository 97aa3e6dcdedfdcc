"""Finds the blocks of a transformers model, and makes views of the model in which only some of them are real.

A view is a copy of the module tree that shares every parameter and buffer with the model. At each index of its block
list stands a `Slot`: it holds a real block or passes its input on, and it is where hidden states enter and leave.
Whatever runs before, between and after the blocks is the model's own code.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.utils.output_capturing import _active_collector


class UnsupportedModelError(ValueError):
    """The model cannot be trained chunk by chunk; the message names the architecture, the reason and the remedy."""

    def __init__(self, model: nn.Module, reason: str):
        name = type(base_model_of(model)).__name__
        super().__init__(
            f"{name} cannot be trained chunk by chunk: {reason} The model is unchanged; train it with LoraConfig and "
            "transformers.Trainer instead."
        )


def base_model_of(model: Any) -> Any:
    """The transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def no_router_logits(model: nn.Module) -> dict[str, bool]:
    """What to call a mixture of experts with where none of its routers runs: it has no balance loss then."""
    return {"output_router_logits": False} if hasattr(base_model_of(model).config, "output_router_logits") else {}


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of transformer blocks, found by structure: the outermost list of as many modules as the config says.

    Raises:
        UnsupportedModelError: an encoder-decoder, layers dropped at random, or no such list.
    """
    base = base_model_of(model)
    config = getattr(base, "config", None)
    if config is None:
        raise UnsupportedModelError(model, "it has no transformers config, so its blocks cannot be told apart.")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(model, "it is an encoder-decoder, and only a single stack of blocks can be cut.")
    config = config.get_text_config()
    for name, value in vars(config).items():
        if name.endswith("layerdrop") and isinstance(value, float | int) and value > 0:
            raise UnsupportedModelError(
                model, f"{name}={value} drops blocks at random during training; set it to 0.0 in the model's config."
            )
    count = config.num_hidden_layers
    lists: dict[str, nn.ModuleList] = {}
    for name, module in base.named_modules():
        inside = any(name.startswith(outer + ".") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            lists[name] = module
    if not lists:
        raise UnsupportedModelError(model, f"it has no list of {count} blocks (num_hidden_layers of its config).")
    return max(lists.values(), key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


@dataclass
class Ports:
    """What passes in and out of one view during a forward pass. Hidden states are `(batch, seq, hidden)`."""

    received: Tensor | None = None
    """h_{k-1}, which the first block of the chunk takes in place of what the embeddings produced."""
    send: Callable[[Tensor], None] | None = None
    """Early forwarding: called with the detached h_k as soon as it exists, before the readout runs."""
    entered: Tensor | None = None
    """What the chunk's first block was given: h_{k-1}."""
    left: Tensor | None = None
    """h_k, with its graph."""
    read: Tensor | None = None
    """What the readout hands to the model's tail."""
    cut: bool = False
    """Whether the readout's gradient stops at h_k, because the adapters rest."""
    skip_chunk: bool = False
    """Whether the chunk's blocks are skipped, so that the readout reads h_{k-1}."""
    skip_readout: bool = False
    """Whether the readout's blocks and adapter are skipped, because only h_k is wanted."""
    checkpoint_readout: bool = False
    """Whether the readout's blocks keep no activations and run again in the backward pass."""
    preserve_rng_state: bool = True
    """Whether PyTorch's global random generator is set back for that; not where several threads share it."""
    last_position_only: bool = False
    """Whether the tail gets only the last position, because the loss is taken elsewhere."""

    def leave(self, hidden: Tensor) -> Tensor:
        """Takes h_k, hands it on, and returns what the readout reads."""
        self.left = hidden
        if self.send is not None:
            self.send(hidden.detach())
            self.send = None
        # The readout must have something to differentiate for reentrant checkpointing.
        return hidden.detach().requires_grad_(torch.is_grad_enabled()) if self.cut else hidden

    def clear(self) -> None:
        """Lets go of every tensor."""
        self.received = self.send = self.entered = self.left = self.read = None


@dataclass
class View:
    """One view: its module tree and its ports."""

    module: nn.Module
    ports: Ports


class Slot(nn.Module):
    """Stands at one index of a view's block list.

    Args:
        original: the block at this index of the model; its plain attributes (such as `attention_type`) are kept.
        block: the real block that runs here, or None to pass the hidden state on.
        kind: `"chunk"` for a block of the chunk, `"readout"` for one of its readout, `"below"` for one before the
            chunk that runs without a graph, `"pass"` otherwise.

    Attributes:
        enters: the received hidden state replaces this slot's input.
        leaves: `"before"` or `"after"` this slot's block the hidden state is h_k.
        exits: this is the last slot; what leaves it goes to the model's tail.
        adapter: readout adapter, applied to h_k where it leaves.
        tuple_length: how many values the model's blocks return as a tuple; 0 for a bare tensor.
        grad_input: the block trains only if its input needs a gradient (reentrant checkpointing).
    """

    def __init__(self, original: nn.Module, ports: Ports, block: nn.Module | None = None, kind: str = "pass"):
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and name != "training" and isinstance(value, str | int | float | bool):
                setattr(self, name, value)
        self.block = block
        self.kind = kind
        self.ports = ports
        self.enters = False
        self.leaves = ""
        self.exits = False
        self.adapter: nn.Module | None = None
        self.tuple_length = 0
        self.grad_input = False

    def forward(self, *args, **kwargs):
        ports = self.ports
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.enters:
            hidden = ports.entered = hidden if ports.received is None else ports.received
            if self.grad_input and torch.is_grad_enabled() and not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_()
        if self.leaves == "before":
            hidden = ports.leave(hidden)
            hidden = hidden if self.adapter is None or ports.skip_readout else self.adapter(hidden)
        rest: tuple[Any, ...] = (None,) * (self.tuple_length - 1)
        skipped = ports.skip_chunk if self.kind == "chunk" else ports.skip_readout
        if self.block is not None and not skipped:
            others = args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}
            with _CONTEXTS.get(self.kind, nullcontext)():
                if self.kind == "readout" and ports.checkpoint_readout and torch.is_grad_enabled():
                    positional, named = tree_map_only(Cache, lambda cache: None, others)
                    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=ports.preserve_rng_state)
                    output = again(self.block, hidden, *positional, **named)
                else:
                    output = self.block(hidden, *others[0], **others[1])
            hidden = output[0] if isinstance(output, tuple) else output
            rest = output[1:] if isinstance(output, tuple) else ()
        if self.leaves == "after":
            hidden = ports.leave(hidden)
        if self.exits:
            ports.read = hidden
            hidden = hidden[:, -1:].detach() if ports.last_position_only else hidden
        return (hidden, *rest) if self.tuple_length else hidden


class Unread(nn.Module):
    """Stands in a view for an embedding table whose output is replaced by what the view receives.

    Args:
        embedded: what the table gives, `(batch, seq, features)`, of which it keeps the last dimension and the type.
    """

    def __init__(self, embedded: Tensor):
        super().__init__()
        self.features, self.dtype = embedded.shape[-1], embedded.dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Zeros `(batch, seq, features)`."""
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.features)


@dataclass
class BlockMap:
    """The blocks of one model and how they are called."""

    model: nn.Module
    blocks: nn.ModuleList
    embedded: Tensor
    """What the embedding table gave for the dry batch, `(batch, seq, features)`."""
    tuple_length: int = 0
    shared: list[Any] = field(default_factory=list)
    aliases: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    """Frozen parameters that have the values of trained ones, which come second; by the first one's id."""

    @classmethod
    def of(cls, model: nn.Module, dry_batch: dict[str, Tensor]) -> "BlockMap":
        """Finds the blocks and watches one forward pass to see what they return."""
        blocks = find_blocks(model)
        returned: list[Any] = []
        embedded: list[Tensor] = []
        base = base_model_of(model)
        hooks = [
            blocks[0].register_forward_hook(lambda module, args, output: returned.append(output)),
            base.get_input_embeddings().register_forward_hook(lambda module, args, output: embedded.append(output)),
        ]
        try:
            with torch.no_grad():
                model(**dry_batch)
        finally:
            for hook in hooks:
                hook.remove()
        if not returned or not embedded:
            raise UnsupportedModelError(model, "its embeddings and its block list are not run by its forward pass.")
        shared = [m.config for m in base.modules() if hasattr(m, "config")]
        shared += [value for name, value in vars(model).items() if name == "peft_config"]
        length = len(returned[0]) if isinstance(returned[0], tuple) else 0
        return cls(model, blocks, embedded[0], length, shared)

    def __len__(self) -> int:
        return len(self.blocks)

    def view(
        self,
        chunk: range,
        readout_blocks: dict[int, nn.Module] | None = None,
        adapter: nn.Module | None = None,
        fresh: Iterable[nn.Parameter] = (),
        replace: dict[nn.Module, nn.Module] | None = None,
        current: Iterable[nn.Parameter] = (),
        below: range = range(0),
    ) -> View:
        """A view whose real blocks are those of `chunk`, then `readout_blocks` by index.

        Args:
            chunk: indices of the real blocks. An empty range makes a tail: all slots pass on, and the received
                hidden state leaves the last one.
            readout_blocks: later blocks that the hidden state runs through after the chunk.
            adapter: what h_k runs through before them.
            fresh: parameters of which the view gets copies of its own.
            replace: modules outside the blocks, and what stands in their place.
            current: parameters outside the blocks that the view reads as they are at any time, but never trains.
            below: indices of blocks before the chunk that run too, without a graph, where no hidden state is received.
        """
        ports = Ports()
        last = len(self) - 1
        replacements: dict[int, nn.Module] = {id(old): new for old, new in (replace or {}).items()}
        if not chunk or (chunk.start > 0 and not below):
            replacements[id(base_model_of(self.model).get_input_embeddings())] = Unread(self.embedded)
        for i, original in enumerate(self.blocks):
            if i in chunk:
                slot = Slot(original, ports, self._copy(original, fresh=fresh), "chunk")
            elif i in below:
                slot = Slot(original, ports, self._copy(original, fresh=fresh), "below")
            elif readout_blocks and i in readout_blocks:
                slot = Slot(original, ports, readout_blocks[i], "readout")
            else:
                slot = Slot(original, ports)
            slot.tuple_length = self.tuple_length
            slot.exits = i == last
            slot.enters = i == (chunk.start if chunk else last)
            if chunk and i == chunk.stop:
                slot.leaves = "before"
                slot.adapter = adapter
            elif chunk and i == last == chunk.stop - 1:
                slot.leaves = "after"
            slot.grad_input = slot.enters and bool(chunk) and needs_input_grad(original)
            replacements[id(original)] = slot
        return View(self._copy(self.model, replacements, fresh, current), ports)

    def parameters_of(self, view: View) -> dict[str, nn.Parameter]:
        """A view's parameters by the names that they have in the model."""
        path = next(name for name, module in self.model.named_modules() if module is self.blocks)
        slot = re.compile(rf"({re.escape(path)}\.\d+)\.block\.")
        return {slot.sub(r"\1.", name): p for name, p in view.module.named_parameters()}

    def _copy(
        self,
        module: nn.Module,
        replacements: dict[int, nn.Module] | None = None,
        fresh: Iterable[nn.Parameter] = (),
        current: Iterable[nn.Parameter] = (),
    ) -> nn.Module:
        own = {id(p) for p in fresh}
        memo: dict[int, Any] = {id(p): p for p in module.parameters() if id(p) not in own}
        memo |= {id(p): self._alias(p) for p in current}
        memo |= {id(b): b for b in module.buffers()}
        memo |= {id(m._hf_hook): m._hf_hook for m in module.modules() if "_hf_hook" in vars(m)}
        for part in module.modules():
            # Weights that are no parameters: quantised ones in 8 bits are kept in a plain attribute.
            memo |= {id(v): v for v in vars(part).values() if isinstance(v, Tensor) or hasattr(v, "CB")}
        memo |= {id(value): value for value in self.shared}
        memo |= replacements or {}
        copied = copy.deepcopy(module, memo)
        for part in copied.modules():
            if "forward" in vars(part):
                part.forward = _rebound(part.forward, memo)
        return copied

    def _alias(self, parameter: nn.Parameter) -> nn.Parameter:
        alias = nn.Parameter(parameter.data, requires_grad=False)
        self.aliases[id(alias)] = (alias, parameter)
        return alias

    def readout_block(self, index: int, weights: str) -> nn.Module:
        """A copy of one block that shares its frozen weights.

        Args:
            weights: `"own"`: adapter parameters of its own; `"current"`: the block's, as they are at any time.
        """
        trainable = [p for p in self.blocks[index].parameters() if p.requires_grad]
        if weights == "current":
            return self._copy(self.blocks[index], current=trainable)
        return self._copy(self.blocks[index], fresh=trainable)


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Keeps transformers from recording what happens inside: a readout's routers are not the chunk's."""
    token = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(token)


_CONTEXTS: dict[str, Callable[[], AbstractContextManager]] = {"readout": _unrecorded, "below": torch.no_grad}


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A patched forward of a view: where it closes over a module of the model, the copy closes over the view's."""
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, memo), memo.get(id(value.__self__), value.__self__))
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, FunctionType) and value.__closure__:
        cells = tuple(CellType(_rebound(cell.cell_contents, memo)) for cell in value.__closure__)
        function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function
    return value


def needs_input_grad(block: nn.Module) -> bool:
    """Whether the block is checkpointed in the reentrant mode, which trains only if its input needs a gradient."""
    for module in block.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and getattr(module, "gradient_checkpointing", False):
            return bool(getattr(checkpoint, "keywords", {}).get("use_reentrant", True))
    return False
