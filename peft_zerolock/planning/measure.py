"""Runs real steps and measures what they take, to hold against what was planned."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig

from ..contract import prepare_trainable
from ..sources import loading, resolve_model
from .blank import MODEL_CLASSES
from .count import StepCount, unique_bytes
from .result import Row
from .trial import Batch, Trial
from .uses import uses_of

_CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def load_weights(name: str, model_config: PretrainedConfig, task: str, dtype: torch.dtype) -> nn.Module:
    """The model with its weights, on the CPU.

    Raises:
        ValueError: they cannot be loaded.
    """
    source = resolve_model(name)
    with loading(name):
        return MODEL_CLASSES[task].from_pretrained(
            source.path, config=model_config, dtype=dtype, **source.model_kwargs()
        )


def measure_row(base: nn.Module, way: Any, row: Row, batch: Batch, optimizer: str) -> str:
    """Runs a row's step on a copy of a loaded model, on the CUDA device if there is one, and notes what it took.

    One step makes the gradients and the optimizer's state, the next one is measured.

    Returns:
        How it was measured.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = get_peft_model(copy.deepcopy(base).to(device), dataclasses.replace(way.config))
    prepare_trainable(model)
    trial = Trial(model.train(), way.config, way.method == "zerolock", way.checkpointing)
    stepper = _CLASSES[optimizer](trial.learned(), lr=1e-6)
    places = trial.places(batch)
    trial.run(places[0])
    stepper.step()
    (use,) = row.devices
    (held,) = uses_of(trial, [StepCount()], [], optimizer, 1)
    use.measured = held.predicted()
    use.measured["gradients"] = unique_bytes(p.grad for p in trial.learned() if p.grad is not None)
    state = [t for tensors in stepper.state.values() for t in tensors.values() if torch.is_tensor(t)]
    use.measured["optimizer"] = unique_bytes(state)
    step = _step_on_cuda if device.type == "cuda" else _step_on_cpu
    use.measured["step"] = max(step(partial(trial.run, entry)) for entry in places)
    use.measured["total"] = sum(size for part, size in use.measured.items() if part != "total")
    if device.type == "cuda":
        use.measured["total"] = torch.cuda.memory_allocated() - before + use.measured["step"]
        return "torch.cuda.max_memory_allocated"
    return "the CPU allocator's record (torch.profiler, profile_memory)"


def _step_on_cuda(run: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _step_on_cpu(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0))
