"""Runs a model's real training step in shape only: tensors have types and storages, but no numbers and no memory."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from counting import tensors_in
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class ShapesOnly:
    """A context in which a model of any size is built and trained without its weights, on the CPU's kernels.

    Weights and what is computed from them are fake tensors (`torch._subclasses.FakeTensorMode`): the code that runs is
    the real step's, kernel choices included. Token ids, masks and labels stay real, because the step asks for their
    values (which positions are supervised, how many there are).

        with ShapesOnly() as shapes:
            model = shapes.model(lambda: get_peft_model(AutoModelForCausalLM.from_config(model_config), config))
            stages = build_stages(model, config, sliced=True)

    The admission test compares no values here, only shapes: that a model passes it is to be found out on real weights.
    """

    def __init__(self):
        self._fake = _OneFakeMode(allow_non_fake_inputs=True)
        self._entered = ExitStack()

    def __enter__(self) -> "ShapesOnly":
        self._entered.enter_context(self._fake)
        self._entered.enter_context(_RealWhereKnown())
        return self

    def __exit__(self, *error) -> None:
        self._entered.close()

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The module that `make` builds, its floating-point parameters and buffers fake; tied ones stay tied.

        Args:
            make: builds the module and reads no values of its weights, which it makes on torch's meta device.
        """
        with unset_fake_temporarily(), _FloatsOnMeta("meta"):
            module = make()
        known: dict[int, Tensor] = {}
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or not tensor.is_floating_point():
                        continue
                    if id(tensor) not in known:
                        known[id(tensor)] = self._fake_like(tensor)
                    tensors[name] = known[id(tensor)]
        return module

    def _fake_like(self, tensor: Tensor) -> Tensor:
        with self._fake:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class _OneFakeMode(FakeTensorMode):
    """Copies of a fake tensor, such as a view's own parameters, belong to the same mode as the tensor."""

    def __deepcopy__(self, memo):
        return self


class _FloatsOnMeta(DeviceContext):
    """`torch.device("meta")` for floating-point tensors; others, such as buffers of positions, keep their values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, dict(kwargs or {}))
        if func in _device_constructors() and isinstance(made, Tensor) and not made.is_floating_point():
            return func(*args, **(kwargs or {}))
        return made


class _RealWhereKnown(TorchDispatchMode):
    """Inside a FakeTensorMode: what no fake tensor takes part in is computed, but for new floating-point tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func is _aten.allclose.default:
                return True
            if func in _INDEXING:
                args = (args[0], _positions(args[1]), *args[2:])
            return func(*args, **kwargs)
        if not tensors:
            made = func(*args, **kwargs)
            if isinstance(made, Tensor) and made.is_floating_point():
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _positions(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices with each real mask replaced by the positions where it is true."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found += index.nonzero().unbind(-1)
        else:
            found.append(index)
    return found
