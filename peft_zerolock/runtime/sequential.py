"""One device: the stages run one after the other, and each one's activations are gone before the next one starts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..stage import Entry, LossFunction, Stage


@dataclass
class WindowReport:
    """What one micro-batch came to, by stage name; scalars, detached."""

    task: dict[str, Tensor] = field(default_factory=dict)
    consistency: dict[str, Tensor] = field(default_factory=dict)


class SequentialRuntime:
    """Forward, hand on, local backward at once (paper, "The algorithm"), for one stage after the other.

    Args:
        stages: first to last.
        backward: runs the backward pass of a scalar (Trainer's, with its loss scale).
        finished: called with a stage when its last backward pass of the update window is done.
    """

    def __init__(
        self,
        stages: list[Stage],
        backward: Callable[[Tensor], None],
        finished: Callable[[Stage], None] = lambda stage: None,
    ):
        self.stages, self.backward, self.finished = stages, backward, finished

    def submit(self, entry: Entry, loss_of: LossFunction, ends_window: bool = True) -> WindowReport:
        """Takes one micro-batch through all the stages; their gradients are added up until the window ends."""
        report = WindowReport()
        for stage in self.stages:
            sent: list[Tensor] = []
            terms = stage.step(entry, sent.append, loss_of)
            if terms is not None:
                if terms.objective.requires_grad:
                    self.backward(terms.objective)
                report.task[stage.name] = terms.task
                if terms.consistency is not None:
                    report.consistency[stage.name] = terms.consistency
            del terms
            if ends_window:
                self.finished(stage)
            if not stage.is_last:
                entry = replace(entry, hidden=sent[0])
        return report
