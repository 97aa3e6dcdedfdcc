"""The control: "the last chunk only", trained beside the chunks; at the end the better of the two stays."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .stage import Stage


class Control:
    """Compares the last chunk's task loss with the control's, window by window, and settles which of them stays.

    The control is LoRA in the last chunk alone, on the same micro-batches in the same order, on what the chunks below
    made of their input before training: what a run with `train_chunks=[-1]` trains. A local loss can cost quality
    because a lower chunk turns early into a shallow classifier and throws away what later ones need. The final loss
    of the moment does not show that: the later chunks have adapted to what they get. A run without the lower
    chunks does. Both losses are of rows before they are learnt from.

    At the end of the training the control is kept where its loss was lower over the last quarter of the update
    windows, by more than one standard error of the paired differences. The lower chunks' adapters are then set back
    to where they began. Checkpoints hold the chunks as they are trained, and the control beside them.

    Cost: for each micro-batch one more forward pass of the lower chunks, without a graph, and one more training step
    of the last chunk; the last chunk's activations again, but not at the same time on one device; a second copy of
    all adapters, and of the last chunk's optimizer state. It needs no gradient of any other chunk.

    Limit: in later passes over the data both losses are of rows seen before, and favour what memorises more.

    Args:
        model: whose adapters are trained.
        last: the last stage, with its control.
    """

    def __init__(self, model: nn.Module, last: Stage):
        assert last.control is not None
        self.model, self.last, self.stage = model, last, last.control
        self.gains: list[float] = []
        self._pending: dict[int, Tensor] = {}

    def add(self, window: int, task: dict[str, Tensor]) -> None:
        """Takes in the task losses of one micro-batch, each a share of its update window's, by stage name."""
        gain = task[self.last.name] - task[self.stage.name]
        self._pending[window] = self._pending[window] + gain if window in self._pending else gain

    def settle(self, windows: int, average: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        """Turns what was added into one difference a window, up to `windows`, a mean over all processes.

        Args:
            average: of a tensor over all processes; every process calls this with the same number of windows.
        """
        new = range(len(self.gains), windows)
        if not new:
            return
        some = next(iter(self._pending.values()), torch.zeros(()))
        found = torch.stack([self._pending.get(window, torch.zeros_like(some)).float() for window in new])
        self.gains += average(found).tolist()
        self._pending.clear()

    def gain(self) -> tuple[float, float]:
        """By how much the control's loss was lower over the last quarter of the windows, and its standard error.

        The error is infinite where there are fewer than two windows.
        """
        latest = torch.tensor(self.gains[-max(1, len(self.gains) // 4) :], dtype=torch.float64)
        if len(latest) < 2:
            return float(latest.mean()) if len(latest) else 0.0, math.inf
        return float(latest.mean()), float(latest.std() / math.sqrt(len(latest)))

    @torch.no_grad()
    def keep(self) -> None:
        """Gives the model the control's adapters, and the lower chunks' as they were."""
        for name, parameter in self.model.named_parameters():
            for kept in (self.stage.adapters, self.stage.copies):
                if name in kept:
                    parameter.copy_(kept[name])
