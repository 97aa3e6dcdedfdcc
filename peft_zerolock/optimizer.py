"""The optimizer: parameter groups of their own for each chunk, so that stepping chunks one by one is stepping all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .stage import Stage

Changes = dict[str, list[dict[str, Any]]]
"""For each chunk, what a scheduler changed in each of its parameter groups."""


def split_by_chunk(optimizer: torch.optim.Optimizer, stages: list[Stage], readout_learning_rate: float | None) -> None:
    """Splits the optimizer's parameter groups, so that each belongs to one chunk's adapters or to its readout."""
    owner: dict[int, tuple[str, bool]] = {}
    for stage in stages:
        owner |= {id(p): (stage.name, False) for p in stage.adapters.values()}
        owner |= {id(p): (stage.name, True) for p in stage.readout.values()}
    groups = []
    for group in optimizer.param_groups:
        split: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            split.setdefault(owner[id(parameter)], []).append(parameter)
        for (chunk, is_readout), parameters in sorted(split.items()):
            rate = (readout_learning_rate if is_readout else None) or group["lr"]
            groups.append({**group, "params": parameters, "chunk": chunk, "lr": rate})
    optimizer.param_groups[:] = groups


class StagedOptimizer(torch.optim.Optimizer):
    """To Trainer and its scheduler one optimizer; each stage steps its own part of it when its update window ends.

    Its state has the form of the optimizer that it is made of, so a checkpoint fits every runtime.

    Args:
        whole: the optimizer, with groups that have a `"chunk"`; it keeps all its state by parameter and by group.
        end_window: called by `step` with what a scheduler changed since the last window; does not wait for the stages.
        settle: returns when no stage is at work.
    """

    def __init__(
        self, whole: torch.optim.Optimizer, end_window: Callable[[Changes], None], settle: Callable[[], None]
    ):
        super().__init__([dict(group) for group in whole.param_groups], whole.defaults)
        self.whole, self.end_window, self.settle = whole, end_window, settle
        self.parts: dict[str, torch.optim.Optimizer] = {}
        self._divide()

    def _divide(self) -> None:
        self.state = self.whole.state
        # The scheduler's view of the groups; the stages' own change when the stages get there.
        self.param_groups[:] = [dict(group) for group in self.whole.param_groups]
        self._told = [dict(group) for group in self.param_groups]
        for chunk in {group["chunk"] for group in self.whole.param_groups}:
            if chunk not in self.parts:
                self.parts[chunk] = object.__new__(type(self.whole))
                self.parts[chunk].__dict__.update(self.whole.__dict__)
            part = self.parts[chunk]
            part.state = self.whole.state
            part.param_groups = [group for group in self.whole.param_groups if group["chunk"] == chunk]

    def _changes(self) -> Changes:
        changes: Changes = {chunk: [] for chunk in self.parts}
        for group, told in zip(self.param_groups, self._told, strict=True):
            changed = {key: value for key, value in group.items() if key != "params" and value is not told.get(key)}
            told |= changed
            changes[group["chunk"]].append(changed)
        return changes

    def _apply(self, chunk: str, changes: Changes) -> None:
        for group, changed in zip(self.parts[chunk].param_groups, changes[chunk], strict=True):
            group.update(changed)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The update window ends: each stage will take its step when it gets there."""
        self.end_window(self._changes())

    def step_chunk(self, chunk: str, changes: Changes) -> None:
        """One chunk's step, with the settings of the time when its window ended. Called by the chunk's worker."""
        if chunk in self.parts:
            self._apply(chunk, changes)
            self.parts[chunk].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a stage drops its gradients after its own step."""

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's, when the stages have taken all their steps."""
        self.settle()
        changes = self._changes()
        for chunk in self.parts:
            self._apply(chunk, changes)
        return self.whole.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the whole optimizer's."""
        self.settle()
        self.whole.load_state_dict(state_dict)
        self._divide()
