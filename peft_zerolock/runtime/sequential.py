"""One device: the stages run one after the other, and each one's activations are gone before the next one starts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..stage import Entry, LossFunction, Stage


@dataclass
class WindowReport:
    """What one micro-batch of an update window came to, by stage name; scalars, detached."""

    window: int
    task: dict[str, Tensor] = field(default_factory=dict)
    consistency: dict[str, Tensor] = field(default_factory=dict)


def learn(
    stage: Stage,
    entry: Entry,
    send: Callable[[Tensor], None] | None,
    loss_of: LossFunction,
    backward: Callable[[Tensor], None],
    report: WindowReport,
    did: Callable[[str], None] = lambda part: None,
) -> None:
    """One stage on one micro-batch: forward, hand on, local backward at once (paper, "The algorithm").

    Args:
        send, loss_of: as in `Stage.step`.
        backward: runs the backward pass of a scalar.
        did: told which part of the work is done: `"readout"` (`"forward"` in the last stage), then `"backward"`.
    """
    terms = stage.step(entry, send, loss_of)
    did("forward" if stage.is_last else "readout")
    if terms is None:
        return
    if terms.objective.requires_grad:
        backward(terms.objective)
    report.task[stage.name] = terms.task
    if terms.consistency is not None:
        report.consistency[stage.name] = terms.consistency
    did("backward")


class SequentialRuntime:
    """One stage after the other.

    Args:
        stages: first to last, then the last one's control where there is one.
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

    def begin_window(self) -> None:
        """Drops the readouts' gradients, which are no parameters of the model and so not Trainer's to drop."""
        for stage in self.stages:
            for parameter in stage.extra.values():
                parameter.grad = None

    def submit(self, entry: Entry, loss_of: LossFunction, ends_window: bool = True) -> WindowReport:
        """Takes one micro-batch through all the stages; their gradients are added up until the window ends."""
        report = WindowReport(entry.window)
        for stage in self.stages:
            sent: list[Tensor] = []
            entry = replace(entry, hidden=None) if stage.is_control else entry
            learn(stage, entry, sent.append, loss_of, self.backward, report)
            if ends_window:
                self.finished(stage)
            if not stage.is_last:
                entry = replace(entry, hidden=sent[0])
        return report

    @property
    def is_idle(self) -> bool:
        """Whether the update window gave no gradient at all."""
        return all(p.grad is None for s in self.stages for p in (*s.adapters.values(), *s.readout.values()))

    def clip(self, limit: float) -> Tensor:
        """Clips each chunk's adapters, and its readout, to `limit` each; returns the norm of the model's own."""
        norms = [(stage, stage.clip(limit)) for stage in self.stages]
        return total_norm([norm for stage, norm in norms if not stage.is_control])

    def drain(self) -> list[WindowReport]:
        """Nothing is on its way here, and no report is owed."""
        return []

    def rested(self) -> AbstractContextManager:
        """Nothing runs beside the calling thread."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to end."""


def total_norm(norms: list[Tensor]) -> Tensor:
    """The norm of all chunks' gradients together."""
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
