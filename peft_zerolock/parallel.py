"""Data parallel: every process trains all chunks on its own rows, and the chunks' gradients are averaged.

No wrapper around the model: a chunk's gradients are sent when its last backward pass of the update window is done,
while the next chunks run.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .stage import Stage


class GradientAverage:
    """Averages gradients over the processes of the default group, one stage after the other.

    Every process calls `start` for the same stages in the same order, whether it had targets or not.
    """

    def __init__(self):
        self._pending: list[tuple[dist.Work, list[nn.Parameter], Tensor]] = []

    def start(self, stage: Stage) -> None:
        """Begins to sum a stage's gradients; one message, `float32`."""
        parameters = [*stage.adapters.values(), *stage.readout.values()]
        if not parameters:
            return
        present = [float(p.grad is not None) for p in parameters]
        parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        message = torch.cat([*parts, torch.tensor(present, device=parts[0].device)]).float()
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        self._pending.append((work, parameters, message))

    def wait(self) -> None:
        """Waits for all sums and writes the means; a parameter that no process had a gradient for keeps none."""
        for work, parameters, message in self._pending:
            work.wait()
            sums, present = message[: -len(parameters)] / dist.get_world_size(), message[-len(parameters) :].tolist()
            for parameter, part, count in zip(
                parameters, sums.split([p.numel() for p in parameters]), present, strict=True
            ):
                if count:
                    parameter.grad = part.view_as(parameter).to(parameter.dtype)
        self._pending.clear()


def same_start(parameters: Iterable[nn.Parameter]) -> None:
    """Gives every process the first one's values."""
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0)
