"""A simulation of stages that work at the same time, from the time that each takes for the parts of its work."""

from dataclasses import dataclass

Op = tuple[str, int]
"""`("F", i)`, `("B", i)`: forward or backward pass of micro-batch i; `("U", w)`: optimizer step of window w."""


@dataclass
class Times:
    """Seconds of one stage: until h_k is sent, for the rest of a micro-batch's work, for an optimizer step."""

    forward: float
    backward: float
    update: float


def local_seconds(stages: list[Times], micro_batches: int, windows: int, transfer: float, depth: int) -> float:
    """How long the concurrent runtime takes: h_k leaves after the forward part, and at most `depth` entries wait.

    Args:
        transfer: seconds from the sending of a hidden state to its arrival.
    """
    count = micro_batches * windows
    begun = [[0.0] * count for _ in stages]
    free = [0.0] * len(stages)
    for i in range(count):
        arrived = 0.0
        for k, stage in enumerate(stages):
            begun[k][i] = max(arrived, free[k])
            sent = begun[k][i] + stage.forward
            if k + 1 < len(stages) and i >= depth:
                sent = max(sent, begun[k + 1][i - depth])  # waits for room
            ends_window = (i + 1) % micro_batches == 0
            free[k] = sent + stage.backward + (stage.update if ends_window else 0.0)
            arrived = sent + transfer
    return max(free)


def pipeline_ops(schedule: str, stage: int, stages: int, micro_batches: int, windows: int) -> list[Op]:
    """What a stage of a backpropagation pipeline does, in order.

    Args:
        schedule: `"gpipe"`: all forward passes of a window, then all backward passes; `"1f1b"`: as many forward passes
            as there are later stages first, then one backward pass after each forward pass.
    """
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage - 1)
    ops: list[Op] = []
    for window in range(windows):
        first = window * micro_batches
        for i in range(micro_batches + ahead):
            if i < micro_batches:
                ops.append(("F", first + i))
            if i >= ahead:
                ops.append(("B", first + i - ahead))
        ops.append(("U", window))
    return ops


def pipeline_seconds(schedule: str, stages: list[Times], micro_batches: int, windows: int, transfer: float) -> float:
    """How long a backpropagation pipeline takes; gradients travel back, and a window ends when all have."""
    last = len(stages) - 1
    ops = [pipeline_ops(schedule, k, len(stages), micro_batches, windows) for k in range(len(stages))]
    done: dict[tuple[int, Op], float] = {}
    free, at = [0.0] * len(stages), [0] * len(stages)
    while any(at[k] < len(ops[k]) for k in range(len(stages))):
        for k, stage in enumerate(stages):
            while at[k] < len(ops[k]):
                kind, number = op = ops[k][at[k]]
                needed = {"F": (k - 1, op), "B": (k + 1, op), "U": None}[kind]
                ready = 0.0
                if needed is not None and 0 <= needed[0] <= last:
                    if needed not in done:
                        break
                    ready = done[needed] + transfer
                seconds = {"F": stage.forward, "B": stage.backward, "U": stage.update}[kind]
                free[k] = done[k, op] = max(free[k], ready) + seconds
                at[k] += 1
    return max(free)
