"""The judge: forward passes tell whether what a lower chunk learns helps the final loss; what does not is undone."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .admission import evaluation_mode
from .stage import Entry, LossFunction, Stage


class Judge:
    """Compares the final loss with a lower chunk's change since the last judgement kept, halved and undone.

    From chunk 1 up to the one below the last, a chunk's adapters are set to `accepted + share * (trained - accepted)`
    with a share of 1, 1/2 and 0, while the rest of the model stays as it is. The share with the lowest final loss
    stands. A difference to share 1 within one standard error (paired, over parts of the rows) is taken for noise, and
    everything stands. A chunk that is undone twice in a row is paused for one period between two judgements: its
    adapters do not learn, its readout does. Then it is tried for one period; undone again, it is paused for twice
    as long as before. The optimizer's state is never undone.

    Cost: at most 2 (K - 1) + 1 forward passes of the model a judgement, without gradient and without readouts, on the
    rows of `parts`; in memory two copies of the lower chunks' adapters. It needs no gradient of any other chunk.

    Limit: it sees the final loss of the moment. A lower chunk that turns into a shallow classifier can lower that in
    the short run and cost in the long run, because the chunks after it could have made more of what it threw away.
    No judge of short-term loss sees this; a longer gradient reach (`readout_blocks`) prevents it.

    Args:
        stages: first to last, with their adapters as they are before training.
    """

    def __init__(self, stages: list[Stage]):
        self.stages = stages
        self._records = {stage.index: _Record(stage) for stage in stages[:-1] if stage.learns}

    @property
    def paused(self) -> frozenset[int]:
        """Indices of the chunks whose adapters are not to learn until the next judgement."""
        return frozenset(index for index, record in self._records.items() if record.pause)

    def judge(
        self, parts: list[Entry], loss_of: LossFunction, total: Callable[[Tensor], Tensor] = lambda sums: sums
    ) -> dict[str, float]:
        """Judges each lower chunk, sets its adapters, and starts the next period.

        Args:
            parts: micro-batches, or parts of them, with targets. Rows that no chunk has learnt from since the last
                judgement tell most. Where all processes together have fewer than two, everything stands.
            loss_of: as in `Stage.step`; the losses of the parts must be sums over one count.
            total: adds up sums `(2, 3)` over all processes, so that they decide the same.

        Returns:
            The share that stands, by the stage's name; 0 for a paused one, none for a chunk without a change.
        """
        verdicts: dict[str, float] = {}
        trees = nn.ModuleList(tree for stage in self.stages for tree in stage.trees().values())
        with torch.no_grad(), evaluation_mode(trees):
            run = _Run(self.stages, parts, loss_of)
            for stage in self.stages[:-1]:
                record = self._records.get(stage.index)
                if record is not None and record.pause:
                    record.counts[1] -= 1
                    verdicts[stage.name] = 0.0
                elif record is not None and record.has_changed:
                    verdicts[stage.name] = _choose(record, run, total)
                run.go_on()
        return verdicts

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name; the tensors are the judge's own, to be filled when a run is resumed."""
        state: dict[str, Tensor] = {}
        for index, record in self._records.items():
            name = self.stages[index].name
            state |= {f"{name}.accepted.{key}": tensor for key, tensor in record.accepted.items()}
            state[f"{name}.counts"] = record.counts
        return state


class _Record:
    """One chunk's adapters, as they were last accepted.

    Attributes:
        counts: `(2,)`: how often in a row they were undone; for how many more judgements they are paused.
    """

    def __init__(self, stage: Stage):
        self.adapters = stage.adapters
        self.accepted = {name: p.detach().clone() for name, p in stage.adapters.items()}
        self.counts = torch.zeros(2, dtype=torch.long)

    @property
    def pause(self) -> int:
        return int(self.counts[1])

    @property
    def has_changed(self) -> bool:
        return any(not torch.equal(p, self.accepted[name]) for name, p in self.adapters.items())

    def scale(self, trained: dict[str, Tensor], share: float) -> None:
        """Sets the adapters; to the bit for shares of 0 and 1."""
        for name, parameter in self.adapters.items():
            parameter.copy_(torch.lerp(self.accepted[name], trained[name], share))

    def accept(self, share: float) -> None:
        """What the adapters are now is where the next period starts."""
        for name, parameter in self.adapters.items():
            self.accepted[name].copy_(parameter)
        undone = int(self.counts[0]) + 1 if share == 0 else 0
        self.counts[0], self.counts[1] = undone, 2 ** (undone - 2) if undone >= 2 else 0


class _Run:
    """The parts on their way up through the stages.

    Attributes:
        outcome: what each stage above the present one gets of each part, and the final loss of each part.
    """

    def __init__(self, stages: list[Stage], parts: list[Entry], loss_of: LossFunction):
        self.stages, self.entered, self.loss_of, self._at = stages, parts, loss_of, 0
        self.outcome = self.again()

    def again(self) -> tuple[list[list[Entry]], Tensor]:
        """From the present stage to the last, with the adapters as they are."""
        received = [self.entered]
        for stage in self.stages[self._at : -1]:
            received.append([stage.pass_on(entry) for entry in received[-1]])
        terms = [self.stages[-1].step(entry, None, self.loss_of) for entry in received[-1]]
        losses = [float(term.task) for term in terms if term is not None]
        return received[1:], torch.tensor(losses, dtype=torch.float64)

    def go_on(self) -> None:
        """To the next stage."""
        received, losses = self.outcome
        self.entered, self.outcome, self._at = received[0], (received[1:], losses), self._at + 1


def _choose(record: _Record, run: _Run, total: Callable[[Tensor], Tensor]) -> float:
    """Sets one chunk's adapters to the share that the final loss chooses, and has the run go on with them."""
    trained = {name: p.detach().clone() for name, p in record.adapters.items()}
    outcomes, kept = {1.0: run.outcome}, run.outcome[1]
    for share in (0.5, 0.0):
        record.scale(trained, share)
        outcomes[share] = run.again()
    gains = torch.stack([kept - outcomes[share][1] for share in (0.5, 0.0)])
    sums = total(torch.stack([torch.ones_like(gains), gains, gains.square()]).sum(-1).T).tolist()
    best, chosen = 0.0, 1.0
    for share, (count, gain, squares) in zip((0.5, 0.0), sums, strict=True):
        noise = math.sqrt(max(squares - gain**2 / count, 0.0) * count / (count - 1)) if count > 1 else math.inf
        if gain > max(best, noise):
            best, chosen = gain, share
    record.scale(trained, chosen)
    record.accept(chosen)
    run.outcome = outcomes[chosen]
    return chosen
