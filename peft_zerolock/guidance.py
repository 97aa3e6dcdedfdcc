"""What keeps the chunks in step with the final loss from outside the training step: when each one learns."""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Trainer

from . import checkpoint
from .calibration import calibrate, same_random_state, sample_batches
from .config import ZeroLockConfig
from .diagnosis import DepthWatch
from .judge import Judge
from .parallel import same_start
from .stage import Entry, Stage

if TYPE_CHECKING:
    _Trainer = Trainer  # what the mixin is mixed into
else:
    _Trainer = object

JUDGED_ROWS = 8


class GuidanceMixin(_Trainer):
    """The part of `ZeroLockMixin` that says which chunks' adapters learn now."""

    args: Any
    _judge: Judge | None = None
    _runtime: Any
    _watch: DepthWatch | None = None
    _verdicts: dict[str, float] = {}

    if TYPE_CHECKING:

        @property
        def zerolock_config(self) -> ZeroLockConfig: ...

        @property
        def stages(self) -> list[Stage]: ...

        def _own_loss(self, num_items: Any, *args: Any) -> tuple[Tensor, Any]: ...

        def _drain(self) -> None: ...

        def _supervised_count(self, inputs: dict[str, Any], num_items: Any) -> Any: ...

    @property
    def _resting(self) -> frozenset[int]:
        """Indices of the chunks whose adapters do not learn in this update window."""
        starts = enumerate(self.zerolock_config.resolved_starts)
        resting = {k for k, start in starts if start > 0 and self.state.global_step < start * self.state.max_steps}
        return frozenset(resting) | (self._judge.paused if self._judge is not None else frozenset())

    def get_batch_samples(self, *args, **kwargs) -> tuple[list, Any]:
        """Trainer's: the micro-batches of the next update window. They are what the judge judges on."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        every, step = self.zerolock_config.judge_every, self.state.global_step
        if not batches:  # the end of a stream, which Trainer finds by asking for one window more
            return batches, num_items
        if self.zerolock_config.objective == "task" and (step == 0 or self._watch is None):
            self._watch = DepthWatch(self.stages, self.zerolock_config, step)
        if step == 0:
            self._start()
        elif self._judge is not None and step % every == 0:
            self.current_gradient_accumulation_steps = len(batches)
            loss_of = partial(self._own_loss, num_items, len(batches))
            self._drain()
            with self._runtime.rested():
                verdicts = self._judge.judge(self._parts(batches, num_items), loss_of, self._sum_over_processes)
            self._verdicts = {f"judge/{name}": share for name, share in verdicts.items()}
        return batches, num_items

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint_folder)
        if checkpoint_folder is not None and self.zerolock_config.judge_every:
            self._start_judging()
            assert self._judge is not None
            checkpoint.load_tensors(checkpoint_folder, checkpoint.JUDGE_NAME, self._judge.state())

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Trainer's log, with each lower chunk's last verdict since the last log."""
        if "loss" in logs:
            logs, self._verdicts = logs | self._verdicts, {}
            if self._watch is not None:
                size = self.args.gradient_accumulation_steps * self.accelerator.num_processes
                self._watch.look(logs, self.state.global_step, self.state.max_steps, size)
        super().log(logs, *args, **kwargs)

    def _start(self) -> None:
        """Before the first update window of a training."""
        if self.zerolock_config.readout_calibration_steps:
            self._calibrate()
        if self.zerolock_config.judge_every:
            self._start_judging()

    def _calibrate(self) -> None:
        steps, rate = self.zerolock_config.readout_calibration_steps, self.zerolock_config.readout_learning_rate
        collate = self._get_collator_with_removed_columns(self.data_collator)
        with same_random_state():
            batches = sample_batches(self.train_dataset, collate, self._train_batch_size, steps, self.args.seed)
            prepared = map(self._prepare_inputs, batches)
            fp16 = self.accelerator.scaler is not None
            calibrate(self.stages, prepared, rate or self.args.learning_rate, fp16)
        if self.accelerator.num_processes > 1:
            same_start(parameter for stage in self.stages for parameter in stage.readout.values())

    def _start_judging(self) -> None:
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.accelerator.num_processes
        if rows < 2:
            raise ValueError(
                f"judge_every={self.zerolock_config.judge_every} with one row in an update window: the judge tells "
                "gain from noise by comparing rows. Raise per_device_train_batch_size or "
                "gradient_accumulation_steps, or leave judge_every at 0."
            )
        self._judge = Judge(self.stages)

    def _parts(self, batches: list[dict[str, Any]], num_items: Any) -> list[Entry]:
        """About JUDGED_ROWS parts of the first micro-batches, each of some rows with targets."""
        parts: list[Entry] = []
        rows = 0
        for inputs in batches:
            inputs = self._prepare_inputs(inputs)
            entry = Entry(inputs, self._supervised_count(inputs, num_items))
            count = min(entry.size, JUDGED_ROWS)
            parts += [entry.take(list(range(i, entry.size, count)), 1.0) for i in range(count)]
            rows += entry.size
            if rows >= JUDGED_ROWS:
                break
        return [part for part in parts if part.has_targets]

    def _sum_over_processes(self, sums: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return sums
        return self.accelerator.reduce(sums.to(self.args.device), "sum")
