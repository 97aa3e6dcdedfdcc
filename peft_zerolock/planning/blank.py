"""Models without weights: built from a config, they run on fake tensors, which have a shape and a type but no data."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from ..config import ZeroLockConfig

MODEL_CLASSES: dict[str, Any] = {
    "CAUSAL_LM": AutoModelForCausalLM,
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
}
aten = torch.ops.aten
_PUTS = (aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default, aten._index_put_impl.default)


class Blank(FakeTensorMode):
    """Fake tensors on the CPU whose few questions about values get the answer of the usual course of a step.

    * A boolean tensor that is an index, or whose true places are looked for, chooses the share `chosen` of them:
      the supervised tokens.
    * `unique()` finds `distinct` values where that is set.
    * A question for yes or no is answered with yes: there are targets among the rows.
    * While stages are built (`trusting`), the admission test's comparison holds, and a number that is read is 0.

    Any other question about values raises, as it does in FakeTensorMode.
    """

    def __init__(self, chosen: float = 1.0, distinct: int | None = None):
        super().__init__()
        self.chosen, self.distinct = chosen, distinct
        self._trusting = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Blank":
        return self  # tensors that are copied stay in their mode

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """While stages are built."""
        self._trusting = True
        try:
            yield
        finally:
            self._trusting = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # what FakeTensorMode comes to, on a longer way
        if self._trusting and func is aten.allclose.default:
            return True
        if func is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True
        if self._trusting and func is aten._local_scalar_dense.default:
            return 0
        if func is aten.index.Tensor and _is_mask(args[1]):
            mask, whole = args[1][0], args[0]
            shape = (round(mask.numel() * self.chosen), *whole.shape[mask.dim() :])
            return super().__torch_dispatch__(aten.new_empty.default, types, (whole, shape), {})
        if func is aten.nonzero.default and args[0].dtype == torch.bool:
            shape = (round(args[0].numel() * self.chosen), args[0].dim())
            long = {"dtype": torch.long}
            return super().__torch_dispatch__(aten.new_empty.default, types, (args[0], shape), long)
        if func in _PUTS and _is_mask(args[1]):
            if func in _PUTS[:2]:
                return args[0]
            return super().__torch_dispatch__(aten.clone.default, types, (args[0],), {})
        if func is aten._unique2.default and self.distinct is not None:
            size = (min(args[0].numel(), self.distinct),)
            found = super().__torch_dispatch__(aten.new_empty.default, types, (args[0], size), {})
            return found, *(super().__torch_dispatch__(aten.new_empty.default, types, (args[0], [0]), {}),) * 2
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool


def blank_model(
    model_config: PretrainedConfig, config: ZeroLockConfig, dtype: torch.dtype, mode: FakeTensorMode
) -> PeftModel:
    """A model with adapters, made from its config alone; no memory is taken for a weight.

    Raises:
        ValueError: PEFT cannot put the adapters on this model, or the task has no model class.
    """
    with torch.device("meta"):
        base = MODEL_CLASSES[known_task(config)].from_config(model_config, dtype=dtype)
        model = get_peft_model(base, dataclasses.replace(config))
    made: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, old in tensors.items():
                    if old is not None and id(old) not in made:
                        made[id(old)] = _without_data(old)
                    tensors[name] = None if old is None else made[id(old)]
    return model.train()


def _without_data(old: torch.Tensor) -> torch.Tensor:
    """In the current mode, on the CPU. What is trained is float32, as the trainer makes it."""
    half = old.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if old.requires_grad and half else old.dtype
    new = torch.empty(old.shape, dtype=dtype, device="cpu")
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def known_task(config: ZeroLockConfig) -> str:
    """The name of the task, which must be one that has a model class.

    Raises:
        ValueError: it has none.
    """
    task = getattr(config.task_type, "value", config.task_type)
    if task not in MODEL_CLASSES:
        raise ValueError(f"task_type={task!r} cannot be planned: it must be one of {', '.join(MODEL_CLASSES)}.")
    return task
