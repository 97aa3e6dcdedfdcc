"""From what a step took to what each device holds, and the largest batch that it has room for."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..blocks import find_blocks
from .count import StepCount, storage_key, unique_bytes
from .devices import Device
from .result import DeviceUse
from .trial import Batch, Trial

OPTIMIZERS = {"adamw": 8, "sgd": 0}
"""Bytes of state for each weight that learns: AdamW keeps two float32 moments, SGD without momentum nothing."""
_COUNTED_TIMES = 8


def uses_of(
    trial: Trial, counts: list[StepCount], devices: Sequence[Device], optimizer: str, in_flight: int
) -> list[DeviceUse]:
    """What each device holds at the peak of its step.

    Args:
        counts: of the trial's stages.
        devices: none (unknown), one for all stages, or one for each; backpropagation takes the one with most memory.
    """
    if trial.stages and len(devices) > 1:
        used = zip(devices, trial.stages, counts, strict=True)
        uses = [_one_chunk(trial, stage, count, device, in_flight) for device, stage, count in used]
    else:
        uses = [_all_chunks(trial, counts, max(devices, key=lambda d: d.memory, default=None))]
    for use, learned in zip(uses, _learned(trial, len(uses)), strict=True):
        use.gradients = unique_bytes(learned)
        use.optimizer = OPTIMIZERS[optimizer] * sum(p.numel() for p in learned)
    return uses


def _learned(trial: Trial, devices: int) -> list[list[nn.Parameter]]:
    if devices == 1:
        return [trial.learned()]
    return [[*stage.adapters.values(), *stage.readout.values()] for stage in trial.stages]


def _all_chunks(trial: Trial, counts: list[StepCount], device: Device | None) -> DeviceUse:
    """One after the other: the device holds every weight, and the activations of one chunk at a time."""
    peak = max(counts, key=lambda count: count.peak)
    trained = {id(p) for p in trial.adapters}
    frozen = [t for t in (*trial.model.parameters(), *trial.model.buffers()) if id(t) not in trained]
    return DeviceUse(
        device="device" if device is None else device.name,
        blocks=[0, len(find_blocks(trial.model))],
        weights=unique_bytes(frozen),
        copies=unique_bytes(p for stage in trial.stages for p in stage.copies.values()),
        adapters=unique_bytes(trial.adapters),
        readouts=unique_bytes(p for stage in trial.stages for p in stage.readout.values()),
        activations=peak.activations,
        logits=peak.logits,
        boundary=peak.boundary,
        flops=sum(count.flops for count in counts),
        capacity=None if device is None else device.memory,
    )


def _one_chunk(trial: Trial, stage: Any, count: StepCount, device: Device, in_flight: int) -> DeviceUse:
    """All that the stage's module trees have: placement puts it on the stage's device, what is missing as copies."""
    trained = {id(p) for p in trial.adapters}
    inside = find_blocks(trial.model)
    own = {id(p) for i in stage.chunk for p in inside[i].parameters()} | {id(p) for p in stage.adapters.values()}
    adapters = [p for p in trial.adapters if id(p) in own]
    frozen = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())} - trained
    held = [t for tree in stage.trees().values() for t in (*tree.parameters(), *tree.buffers())]
    weights, readouts = [t for t in held if id(t) in frozen], list(stage.readout.values())
    known = {storage_key(t) for t in (*weights, *readouts, *adapters)}
    return DeviceUse(
        device=device.name,
        blocks=[stage.chunk.start, stage.chunk.stop],
        weights=unique_bytes(weights),
        copies=unique_bytes(t for t in held if storage_key(t) not in known),
        adapters=unique_bytes(adapters),
        readouts=unique_bytes(readouts),
        activations=count.activations,
        logits=count.logits,
        boundary=count.boundary * (in_flight if stage.index > 0 else 1),
        flops=count.flops,
        capacity=device.memory,
    )


def largest_batch(uses_at: Callable[[int], list[DeviceUse]], rows: int, uses: list[DeviceUse]) -> int | None:
    """The largest number of rows for which every device's memory is enough.

    A peak is close to a line in the number of rows, so that lines through counts lead to it. A step of the rows that
    are returned was counted, unless they are more than 8 times those that were asked for: then the line is believed.

    Args:
        uses_at: counts a step of so many rows.
        rows, uses: a number that was counted, and what it took.

    Returns:
        0 where one row is too much, None where a device's memory is unknown.
    """
    if any(use.capacity is None for use in uses):
        return None
    known = {rows: uses}
    guess = min(int(rows * (_free(use) + use.step) / use.step) for use in uses)
    most = _COUNTED_TIMES * rows
    for _ in range(6):
        fitting = max((n for n, found in known.items() if _fit(found)), default=0)
        too_many = min((n for n, found in known.items() if not _fit(found)), default=math.inf)
        guess = int(min(max(guess, fitting), too_many - 1))
        if guess <= fitting or fitting == most:
            return max(guess, fitting)
        guess = min(guess, most)
        known[guess] = uses_at(guess)
        guess = _by_lines(known)
    return max((n for n, found in known.items() if _fit(found)), default=0)


def _free(use: DeviceUse) -> int:
    return (use.capacity or 0) - use.total


def _fit(uses: list[DeviceUse]) -> bool:
    return all(bool(use.fits) for use in uses)


def _by_lines(known: dict[int, list[DeviceUse]]) -> int:
    """Where the lines through two counts cross the limit: one on each side of it, or the two that are nearest."""
    counted = sorted(known)
    fitting = sum(_fit(known[rows]) for rows in counted)
    first = min(max(fitting - 1, 0), len(counted) - 2) if fitting < len(counted) else len(counted) - 2
    low, high = counted[first : first + 2]
    limits = []
    for one, other in zip(known[low], known[high], strict=True):
        slope = (other.total - one.total) / (high - low)
        limits.append(low + _free(one) / slope if slope > 0 else math.inf)
    return max(int(min(limits)), 0) if min(limits) < math.inf else high


def with_rows(batch: Batch, rows: int) -> Batch:
    """The same batch with another number of rows."""
    return dataclasses.replace(batch, rows=rows)
