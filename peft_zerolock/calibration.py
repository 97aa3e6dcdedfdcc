"""Readouts calibrated before training: each learns to say what the whole model says, without labels."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .admission import evaluation_mode
from .objective import TokenObjective, supervised_tokens
from .stage import Entry, Stage


def calibrate(
    stages: list[Stage], batches: Iterable[dict[str, Any]], learning_rate: float, fp16: bool = False
) -> None:
    """Trains the readouts' own parameters, and nothing else, to match the model as it is.

    With the sliced loss of causal LMs the readout's distribution at the supervised positions is brought to the
    model's: KL(model || readout). Elsewhere, as the head of a classifier is untrained, the hidden states before
    the tail are brought to the model's last ones: mean squared difference over the attended positions, after a layer
    norm without parameters. In evaluation mode, with AdamW at a constant rate and without weight decay.

    Args:
        stages: first to last.
        batches: micro-batches, one a step.
        learning_rate: of all readouts.
        fp16: scale the losses, as half precision needs.
    """
    trained = [stage for stage in stages[:-1] if stage.readout]
    optimizers = [torch.optim.AdamW(s.readout.values(), lr=learning_rate, weight_decay=0.0) for s in trained]
    scalers = [torch.amp.GradScaler("cuda", enabled=fp16) for _ in trained]  # type: ignore[attr-defined]
    with evaluation_mode(nn.ModuleList(tree for stage in stages for tree in stage.trees().values())):
        for inputs in batches:
            entry, received = Entry(inputs, 1.0), {}
            for stage in stages[:-1]:
                entry = received[stage.index] = stage.pass_on(entry)
            with torch.no_grad():
                goal = stages[-1].read(entry)
            for stage, optimizer, scaler in zip(trained, optimizers, scalers, strict=True):
                loss = _mismatch(stage, received[stage.index], goal, stages[-1], scaler.get_scale())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


def _mismatch(stage: Stage, entry: Entry, goal: Tensor, last: Stage, grad_scale: float) -> Tensor:
    """How far a chunk's readout of the hidden state that the next stage gets is from the model's `goal`."""
    read = stage.read(entry)
    if stage.tail is None:
        attended = entry.inputs.get("attention_mask", torch.ones(read.shape[:2], device=read.device)).bool()
        ours, theirs = (F.layer_norm(states[attended].float(), states.shape[-1:]) for states in (read, goal))
        return F.mse_loss(ours, theirs)
    mask, targets = supervised_tokens(entry.inputs)
    slice_size = stage.config.logits_slice or len(targets)
    objective = TokenObjective(
        stage.tail, stage.tail.parameters, slice_size, alpha=0.0, direction="reverse", reference=last.tail
    )
    with stage.autocast():
        return objective(read[mask], targets, max(len(targets), 1), goal[mask], grad_scale).objective


def sample_batches(
    dataset: Any, collate: Callable[[list[Any]], Any], size: int, steps: int, seed: int
) -> Iterator[Any]:
    """Micro-batches of `size` rows of a data set for so many steps: random rows, or the first ones of a stream."""
    try:
        number = len(dataset)
    except TypeError:
        rows = iter(row for _ in count() for row in dataset)
        yield from (collate(list(islice(rows, size))) for _ in range(steps))
        return
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield collate([dataset[i] for i in torch.randint(number, (size,), generator=generator).tolist()])


@contextmanager
def same_random_state() -> Iterator[None]:
    """Afterwards the generators of Python, NumPy and PyTorch are as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
