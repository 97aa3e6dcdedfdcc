"""What a run's own losses say about it: whether the last chunk still gains on the readout before it."""

from dataclasses import dataclass

from transformers.utils import logging

from .config import ZeroLockConfig
from .stage import Stage

logger = logging.get_logger(__name__)

ENOUGH_MICRO_BATCHES = 50


@dataclass
class DepthWatch:
    """Warns once where the last chunk's task loss is not below that of the readout before it.

    Task losses should fall with depth (paper, Prop. 1). Judged in the second half of the training, on means over at
    least `ENOUGH_MICRO_BATCHES` micro-batches. Readouts that run through all the later blocks are as deep as the
    model: nothing follows from a comparison with them, and there is none.

    Args:
        stages: first to last.
        config: for what the warning says.
        since: update windows at the last log.
    """

    stages: list[Stage]
    config: ZeroLockConfig
    since: int = 0
    _windows: int = 0
    _lower: float = 0.0
    _last: float = 0.0
    _done: bool = False

    def look(self, losses: dict[str, float], step: int, max_steps: int, micro_batches: int) -> None:
        """Takes in one log.

        Args:
            losses: mean task losses since the last log, as `loss/chunk_k`; a log without them is passed over.
            step, max_steps: update windows so far, and of the whole training.
            micro_batches: those of one update window, over all processes.
        """
        windows, late = step - self.since, 2 * self.since >= max_steps
        self.since = step
        below = [stage for stage in self.stages[:-1] if stage.learns]
        last = self.stages[-1]
        if self._done or not late or not below or not last.learns or self._is_as_deep(below[-1]):
            return
        names = [f"loss/{stage.name}" for stage in (below[-1], last)]
        if not losses.keys() >= set(names):
            return
        self._windows += windows
        self._lower, self._last = (
            total + windows * losses[name] for total, name in zip((self._lower, self._last), names, strict=True)
        )
        if self._windows * micro_batches < ENOUGH_MICRO_BATCHES:
            return
        if self._last >= self._lower:
            self._done = True
            self._warn(below[-1], last)
        self._windows, self._lower, self._last = 0, 0.0, 0.0

    def _is_as_deep(self, stage: Stage) -> bool:
        return stage.reach >= self.stages[-1].chunk.stop - stage.chunk.stop

    def _warn(self, below: Stage, last: Stage) -> None:
        logger.warning(
            f"The last chunk gains nothing on the chunk before it: over {self._windows} update windows its task loss "
            f"was {self._last / self._windows:.4f}, that of {below.name}'s readout {self._lower / self._windows:.4f}. "
            f"The lower chunks have taken what {last.name} needs. Let their readouts look further ahead "
            f"(readout='blocks' with more readout_blocks, now {self.config.readout_blocks!r}; readout_rows='auto' "
            f"pays for it), use fewer chunks (num_chunks, now {self.config.resolved_num_chunks}), or train the last "
            "one only (train_chunks=[-1])."
        )
