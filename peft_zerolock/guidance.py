"""What looks at the training from outside the training step: when chunks learn, whether depth pays, the control."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Trainer
from transformers.utils import logging

from . import checkpoint
from .config import ZeroLockConfig
from .control import Control
from .diagnosis import DepthWatch
from .stage import Stage

logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    _Trainer = Trainer  # what the mixin is mixed into
else:
    _Trainer = object


class GuidanceMixin(_Trainer):
    """The part of `ZeroLockMixin` that compares chunks with each other and with the control."""

    args: Any
    model: Any
    _control: Control | None = None
    _watch: DepthWatch | None = None

    if TYPE_CHECKING:

        @property
        def zerolock_config(self) -> ZeroLockConfig: ...

        @property
        def stages(self) -> list[Stage]: ...

        def _drain(self) -> None: ...

    @property
    def _resting(self) -> frozenset[int]:
        """Indices of the chunks whose adapters do not learn in this update window."""
        warmup = self.zerolock_config.readout_warmup_ratio * self.state.max_steps
        return frozenset(range(len(self.stages) - 1)) if self.state.global_step < warmup else frozenset()

    def get_batch_samples(self, *args, **kwargs) -> tuple[list, Any]:
        """Trainer's: the micro-batches of the next update window."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        step = self.state.global_step
        if batches and self.zerolock_config.objective == "task" and (step == 0 or self._watch is None):
            self._watch = DepthWatch(self.stages, self.zerolock_config, step)
        if batches and self.zerolock_config.control and step == 0:
            self._control = Control(self.model, self.stages[-1])
        return batches, num_items

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint_folder)
        if checkpoint_folder is not None and self.zerolock_config.control:
            self._control = Control(self.model, self.stages[-1])
            saved = checkpoint.read_tensors(checkpoint_folder, checkpoint.CONTROL_NAME)
            self._control.gains = saved["gains"].tolist()

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Trainer's log; the last chunk is compared with the readout before it, and with the control."""
        if "loss" in logs and self._watch is not None:
            size = self.args.gradient_accumulation_steps * self.accelerator.num_processes
            self._watch.look(logs, self.state.global_step, self.state.max_steps, size)
        super().log(logs, *args, **kwargs)

    def _settle_control(self) -> None:
        """Brings the comparison with the control up to date. The stages must be at rest."""
        if self._control is not None:
            self._control.settle(self.state.global_step, self._mean_over_processes)

    def _finalize_training(self, *args, **kwargs):
        """Trainer's; before it, the better of chunks and control becomes the model."""
        self._drain()
        if self._control is not None:
            self._settle_control()
            gain, noise = self._control.gain()
            kept = gain > noise
            self.log({"control/gain": gain, "control/kept": float(kept)})
            if kept:
                self._control.keep()
                logger.warning(
                    f"The chunks below the last cost quality: over the last quarter of the update windows the last "
                    f"chunk's loss was higher by {gain:.4f} (standard error {noise:.4f}) than that of the control, "
                    f"LoRA in the last chunk only. The control is what the model has now. Let the lower chunks' "
                    f"readouts look further ahead (readout_blocks, now {self.zerolock_config.readout_blocks!r}, "
                    f"readout={self.zerolock_config.readout!r}), use fewer chunks, or save time with "
                    "train_chunks=[-1]."
                )
        return super()._finalize_training(*args, **kwargs)

    def _mean_over_processes(self, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values.to(self.args.device), "mean")
