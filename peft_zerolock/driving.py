"""How Trainer's loop and the runtime are kept in step: what is drained when, and whose gradients are whose."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.utils import logging

from .noise import draws_elsewhere
from .optimizer import StagedOptimizer
from .runtime import ConcurrentRuntime, SequentialRuntime, Trace, WindowReport
from .stage import Stage, with_control

if TYPE_CHECKING:
    _Trainer = Trainer  # what the mixin is mixed into
else:
    _Trainer = object

logger = logging.get_logger(__name__)


class DrivingMixin(_Trainer):
    """The part of `ZeroLockMixin` that makes the runtime, and lets a concurrent one run ahead of Trainer's loop.

    Trainer stays in charge: its optimizer's `step` marks the end of an update window, and whatever looks at weights or
    sums (a log, an evaluation, a save, the end of an epoch or of the training) waits until all stages are done.
    """

    model: Any
    args: Any
    _average: Any
    _runtime: Any = None

    if TYPE_CHECKING:

        def _add_to_log(self, report: WindowReport) -> Tensor: ...

    def _make_runtime(self, stages: list[Stage]) -> SequentialRuntime | ConcurrentRuntime:
        stages = with_control(stages)
        if getattr(self.args, "runtime", "sequential") == "sequential":
            finished = self._average.start if self.accelerator.num_processes > 1 else lambda stage: None
            return SequentialRuntime(stages, self.accelerator.backward, finished)
        self._check_noise(stages)
        trace = Trace(self.args.trace) if self.args.trace is not None else None
        return ConcurrentRuntime(
            stages, [stage.device for stage in stages], self.accelerator.backward, self.args.in_flight_depth, trace
        )

    def _check_noise(self, stages: list[Stage]) -> None:
        """What draws from a generator that all threads share; checkpointing must leave that one alone too.

        Raises:
            ValueError: such a stage is checkpointed: its second forward pass could not draw what the first one drew.
        """
        checkpointed: list[Any] = [
            module
            for stage in stages
            for module in stage.view.module.modules()
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func")
        ]
        drawing = draws_elsewhere(stages, self.model)
        for stage in stages:
            stage.view.ports.preserve_rng_state = False
            stage.runs_again = not drawing
        if drawing and checkpointed:
            raise ValueError(
                f"{', '.join(drawing)} draw(s) from PyTorch's global random generator (dropout inside the attention "
                "function, or NEFTune), which the stages of runtime='concurrent' share: with activation checkpointing "
                "the second forward pass would draw other numbers. Set the model's attention dropout to 0, leave "
                "checkpointing out, or use runtime='sequential'."
            )
        if drawing:
            logger.warning_once(
                f"{', '.join(drawing)} draw(s) from PyTorch's global random generator (dropout inside the attention "
                "function, or NEFTune), which the stages of runtime='concurrent' share: runs are not repeatable. Set "
                "the model's attention dropout to 0 to make them so."
            )
        for module in checkpointed:
            checkpoint = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = partial(checkpoint, preserve_rng_state=False)

    def _by_stage(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as Trainer is to see it."""
        if not isinstance(self._runtime, ConcurrentRuntime):
            return optimizer
        self._runtime.optimizer = StagedOptimizer(optimizer, self._runtime.end_window, self._drain)
        return self._runtime.optimizer

    # ---- Trainer's loop ----

    def _inner_training_loop(self, *args, **kwargs):
        """Trainer's; however it ends, no worker is left."""
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            if self._runtime is not None:
                self._runtime.close()

    def _run_epoch(self, model: nn.Module, *args, **kwargs) -> None:
        """Trainer's. The gradients that it drops after each window are the stages' own in a concurrent runtime."""
        if not isinstance(self._runtime, ConcurrentRuntime):
            super()._run_epoch(model, *args, **kwargs)
            return
        with _keeps_gradients(model):
            super()._run_epoch(model, *args, **kwargs)
            self._drain()

    def _drain(self) -> None:
        """Waits until all stages are done, and adds what they reported to Trainer's sum as it does by itself."""
        for report in self._runtime.drain() if self._runtime is not None else ():
            loss = self._add_to_log(report)
            if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
                loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            self._tr_loss += loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, *args, **kwargs) -> None:
        control = self.control
        if control.should_log or control.should_evaluate or control.should_save:
            self._drain()
            if grad_norm is not None and isinstance(self._runtime, ConcurrentRuntime):
                grad_norm = self._get_grad_norm(model)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    def _finalize_training(self, *args, **kwargs):
        self._drain()
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        """Trainer's, on weights that no stage is changing."""
        self._drain()
        if not isinstance(self._runtime, ConcurrentRuntime):
            return super().evaluation_loop(*args, **kwargs)
        with self._runtime.rested():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args, **kwargs) -> None:
        """Trainer's, on weights that no stage is changing."""
        self._drain()
        super().save_model(*args, **kwargs)

    def _show_finished_windows(self) -> None:
        """Lets the progress bar count the windows that the last stage has finished."""
        shown = self.pop_callback(ProgressCallback)
        if shown is not None:
            self.add_callback(FinishedWindows(self))


class FinishedWindows(ProgressCallback):
    """Trainer's progress bar, counting the update windows that the last stage has finished."""

    def __init__(self, trainer: DrivingMixin):
        super().__init__()
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        """Trainer has submitted another window."""
        runtime = self.trainer._runtime
        waiting = runtime.windows_in_flight if isinstance(runtime, ConcurrentRuntime) else 0
        self._show(state, state.global_step - waiting)

    def on_train_end(self, args, state, control, **kwargs):
        """All windows are finished."""
        self._show(state, state.global_step)
        super().on_train_end(args, state, control, **kwargs)

    def _show(self, state, finished: int) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.update(finished - self.current_step)
            self.current_step = finished


@contextmanager
def _keeps_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, `model.zero_grad()` does nothing."""
    model.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.zero_grad
