"""Counts what a training step takes: bytes that its operations keep alive, floating-point operations."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _grouped_flops(rows: Any, matrices: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * rows.numel() * matrices.shape[-1]  # experts: each row meets one matrix


_MORE_FORMULAS = {
    aten._grouped_mm: _grouped_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


@dataclass
class StepCount:
    """What one stretch of a step took.

    Attributes:
        activations: bytes that the stretch made and that were alive at its peak, logits left out.
        logits: those of tensors whose last dimension is the vocabulary.
        boundary: bytes alive all along, made before the stretch: the hidden state handed to it.
        flops: floating-point operations of matrix products, convolutions and attention.
    """

    activations: int = 0
    logits: int = 0
    boundary: int = 0
    flops: int = 0

    @property
    def peak(self) -> int:
        """The most bytes alive at one time."""
        return self.activations + self.logits + self.boundary


class StepCounter(TorchDispatchMode):
    """Counts the operations inside the context, real ones or those of fake tensors.

    A storage counts from the operation that makes it until nobody holds it; what an operation needs for itself inside
    its kernel is not seen, nor what existed before.

    Args:
        weights: parameters and buffers, which were there before.
        vocab: size of the last dimension by which logits are known; None: they are not told apart.
    """

    def __init__(self, weights: Iterable[Tensor] = (), vocab: int | None = None):
        super().__init__()
        self.vocab = vocab
        self.weights = {storage_key(w) for w in weights}
        self.living: dict[int, tuple[int, bool, Any]] = {}
        self.bytes, self.logits = 0, 0
        self._start: int | None = None
        self.count = StepCount()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # how fake tensors are asked for their device
            return func(*args, **kwargs)
        if self._start is None:
            self._start = self.bytes
            self.count.boundary = self.bytes
        given = {storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        packet: Any = getattr(func, "_overloadpacket", None)
        formula: Any = flop_registry.get(packet) or _MORE_FORMULAS.get(packet)
        if formula is not None:
            shaped = {} if packet in _MORE_FORMULAS else {"out_val": result}
            self.count.flops += int(formula(*args, **kwargs, **shaped))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._born(tensor, given)
        if self.bytes > self.count.peak:
            self.count.logits = self.logits
            self.count.activations = self.bytes - self.logits - self.count.boundary
        return result

    def _born(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in given or key in self.living or key in self.weights:
            return
        is_logits = self.vocab is not None and tensor.dim() > 1 and tensor.shape[-1] == self.vocab
        size = storage.nbytes()
        self.living[key] = (size, is_logits, weakref.ref(storage, lambda _: self._died(key)))
        self.bytes += size
        self.logits += size if is_logits else 0

    def _died(self, key: int) -> None:
        size, is_logits, _ = self.living.pop(key)
        self.bytes -= size
        self.logits -= size if is_logits else 0

    def take(self) -> StepCount:
        """What was counted since the last call."""
        taken, self.count, self._start = self.count, StepCount(), None
        return taken


def storage_key(tensor: Tensor) -> int:
    """What tells a tensor's storage from others while it lives."""
    return tensor.untyped_storage()._cdata


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
