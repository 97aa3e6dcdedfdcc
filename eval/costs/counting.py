"""Counts the bytes of living tensors by what they are for, operation by operation, on real and on fake tensors."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

BASE, ADAPTERS, READOUTS = "base weights", "adapters", "readouts"
GRADIENTS, OPTIMIZER = "gradients", "optimizer state"
ACTIVATIONS, BOUNDARY = "activations", "boundary states"
LOGITS, TEMPORARIES = "logits", "temporaries"
CATEGORIES = (BASE, ADAPTERS, READOUTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BOUNDARY, LOGITS, TEMPORARIES)


@dataclass
class _Storage:
    size: int
    category: str
    made_as: str
    saved: int = 0


class MemoryCounter(TorchDispatchMode):
    """A context that follows every storage which an operation inside it makes, from its making to its end.

    A storage counts once, whatever views it has, in one category:

    * `activations`: autograd holds it for a backward pass, or activation checkpointing is computing it again for one;
    * `gradients`: of the parameters given to `add_parameters`;
    * `base weights`, `adapters`, `readouts`, `optimizer state`, `boundary states`: what `mark` was told;
    * `logits`: its last dimension is the vocabulary, and autograd does not hold it;
    * `temporaries`: everything else, gradients of activations included.

    What a kernel allocates and frees within one operation is not seen, nor what was made outside and not marked.

    Args:
        vocab: size of the vocabulary; without it nothing is counted as logits.

    Attributes:
        held: bytes by category, now.
        peak: the most bytes at one time.
        at_peak: bytes by category at that time.
        peaks: each category's own most, by category.
        activation_peak: the most of activations and boundary states together.
    """

    def __init__(self, vocab: int | None = None):
        super().__init__()
        self.vocab = vocab
        self.held = dict.fromkeys(CATEGORIES, 0)
        self._storages: dict[int, _Storage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.restart()

    def restart(self) -> None:
        """Forgets peaks and averages; what is held stays."""
        self.total = sum(self.held.values())
        self.peak, self.at_peak, self.peaks = self.total, dict(self.held), dict(self.held)
        self.activation_peak = self.held[ACTIVATIONS] + self.held[BOUNDARY]
        self._sums, self._made = dict.fromkeys(CATEGORIES, 0), 0

    @property
    def averages(self) -> dict[str, float]:
        """Bytes by category, the mean over the moments at which a storage has just been made."""
        return {name: total / max(1, self._made) for name, total in self._sums.items()}

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Says what the storages of `tensors` are for; counts those that were made outside."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            if known is None:
                self._add(storage, category)
            else:
                known.made_as = category
                self._move(known, category)

    def add_parameters(self, parameters: Iterable[nn.Parameter], category: str) -> None:
        """Counts parameters under `category`, and their gradients as gradients."""
        for parameter in parameters:
            self.mark([parameter], category)
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self.mark([p.grad], GRADIENTS))
                self._handles.append(hook)

    def __enter__(self) -> "MemoryCounter":
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self._storages:
                continue
            if all(storage._cdata != given.untyped_storage()._cdata for given in tensors_in((args, kwargs))):
                self._add(storage, self._kind(tensor))
                self._made += 1
                for name, size in self.held.items():
                    self._sums[name] += size
        return result

    def _kind(self, tensor: Tensor) -> str:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            return ACTIVATIONS  # grad mode inside a backward pass: checkpointing runs a block again
        return LOGITS if self.vocab is not None and tensor.shape[-1:] == (self.vocab,) else TEMPORARIES

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage._cdata
        self._storages[key] = _Storage(storage.nbytes(), category, category)
        self._change(category, storage.nbytes())
        weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        gone = self._storages.pop(key)
        self._change(gone.category, -gone.size)

    def _move(self, storage: _Storage, category: str) -> None:
        if category != storage.category:
            self._change(storage.category, -storage.size)
            storage.category = category
            self._change(category, storage.size)

    def _change(self, category: str, size: int) -> None:
        self.held[category] += size
        self.total += size
        if size < 0:
            return
        self.peaks[category] = max(self.peaks[category], self.held[category])
        self.activation_peak = max(self.activation_peak, self.held[ACTIVATIONS] + self.held[BOUNDARY])
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.held)

    def _pack(self, tensor: Tensor) -> "_Packed":
        known = self._storages.get(tensor.untyped_storage()._cdata)
        if known is not None:
            known.saved += 1
            if known.category in (LOGITS, TEMPORARIES):
                self._move(known, ACTIVATIONS)
        return _Packed(self, tensor.detach(), known)

    def _release(self, storage: _Storage) -> None:
        storage.saved -= 1
        if storage.saved == 0 and storage.category == ACTIVATIONS:
            self._move(storage, storage.made_as)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in an operation's arguments or results: nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


class _Packed:
    """A tensor that autograd holds; `detach`ed, as an output that is its own graph would never be freed."""

    def __init__(self, counter: MemoryCounter, tensor: Tensor, storage: _Storage | None):
        self.counter, self.tensor, self.storage = counter, tensor, storage

    def __del__(self):
        if self.storage is not None:
            self.counter._release(self.storage)
