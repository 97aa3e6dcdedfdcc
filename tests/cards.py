"""Devices that are not there: `lazy:1`, `lazy:2` ... hold real values, compute on the CPU and refuse to mix.

`lazy` is a device type of PyTorch's own that no other part of it uses here. Its tensors are a subclass that does every
operation on CPU tensors inside; an operation on tensors of two devices raises, as it does on real ones, in forward and
backward passes and in the optimizer. What is compared with such a run must have run on such a device too: PyTorch
chooses other attention kernels on the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)


class _Backend:
    """What PyTorch asks a device type for."""

    device_count = staticmethod(lambda: 5)
    current_device = staticmethod(lambda: 0)
    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)


class Card(Tensor):
    """A tensor on such a device.

    Args:
        raw: its values, on the CPU; or a Card, of which it is another.
        device: where it lies.
    """

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Any, device: Any = None, requires_grad: bool = False):
        if isinstance(raw, Card):
            raw, device = raw.raw, raw.device
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"Card({self.raw}, {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Card, (self.raw, str(self.device), self.requires_grad)

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # As on real devices, a scalar on the CPU may meet a tensor elsewhere.
        places = {t.device for t in given if isinstance(t, Card) or t.dim() > 0}
        if len(places) > 1 and func not in _COPIES:
            raise RuntimeError(f"{func} mixes tensors on {sorted(map(str, places))}")
        device = torch.device(kwargs.get("device") or next(t.device for t in given if isinstance(t, Card)))
        if func is aten.copy_.default:
            device = args[0].device
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        inner_args, inner_kwargs = tree_map_only(Card, lambda t: t.raw, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        if device.type == "cpu":
            return args[0] if func is aten.copy_.default else result
        outer = {id(t.raw): t for t in given if isinstance(t, Card)}  # what an operation in place returns
        return tree_map_only(Tensor, lambda t: outer[id(t)] if id(t) in outer else Card(t, device), result)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Card(torch.empty(size, dtype=dtype), device)


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Card(torch.empty_strided(size, stride, dtype=dtype), device)


def _copy_from(source, target, non_blocking=False):
    getattr(target, "raw", target).copy_(getattr(source, "raw", source))
    return target


torch._register_device_module("lazy", _Backend)
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "Lazy")
_LIBRARY.impl("empty_strided", _empty_strided, "Lazy")
_LIBRARY.impl("_copy_from", _copy_from, "Lazy")
torch.serialization.add_safe_globals([Card])
