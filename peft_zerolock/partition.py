"""Which blocks form which chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any


def split_evenly(num_blocks: int, num_chunks: int) -> list[range]:
    """Splits blocks 0 .. num_blocks - 1 into consecutive chunks whose sizes differ by at most one.

    The first chunks get the larger share: the last one also runs the model's head.

    Raises:
        ValueError: fewer than one chunk, or more chunks than blocks.
    """
    if not 1 <= num_chunks <= num_blocks:
        raise ValueError(
            f"num_chunks={num_chunks}: the model has {num_blocks} block(s), so it can be cut into 1 to {num_blocks} "
            "chunks. Choose a number in that range."
        )
    small, larger = divmod(num_blocks, num_chunks)
    return chunks_of_sizes(num_blocks, [small + (k < larger) for k in range(num_chunks)])


def chunks_of_sizes(num_blocks: int, sizes: list[int]) -> list[range]:
    """Consecutive chunks of the given sizes.

    Raises:
        ValueError: the sizes do not add up to the number of blocks.
    """
    if sum(sizes) != num_blocks:
        raise ValueError(
            f"chunk_sizes={sizes} adds up to {sum(sizes)}, but the model has {num_blocks} blocks: every block belongs "
            "to exactly one chunk, so change the sizes until they add up."
        )
    chunks, start = [], 0
    for size in sizes:
        chunks.append(range(start, start + size))
        start += size
    return chunks


def split_runs(runs: list[int], num_chunks: int) -> list[int]:
    """Chunk sizes for runs of blocks, each of which is cut by itself, as evenly as can be.

    A run gets a number of chunks in proportion to its blocks, one at least.

    Args:
        runs: how many blocks each has.

    Raises:
        ValueError: fewer chunks than runs, or more than blocks.
    """
    if not len(runs) <= num_chunks <= sum(runs):
        raise ValueError(
            f"num_chunks={num_chunks}: the blocks lie in {len(runs)} runs of {runs} on different devices, and a chunk "
            f"lies on one device: use {len(runs)} to {sum(runs)} chunks, or load the model on fewer devices."
        )
    counts = [1] * len(runs)
    for _ in range(num_chunks - len(runs)):
        largest = max(range(len(runs)), key=lambda i: runs[i] / counts[i])
        counts[largest] += 1
    return [len(chunk) for run, count in zip(runs, counts, strict=True) for chunk in split_evenly(run, count)]


def cut(
    homes: Sequence[Any], sizes: list[int] | None, num_chunks: int, devices: Sequence[Any] | None = None
) -> list[range]:
    """Which blocks form which chunk, where they may lie on several devices.

    Blocks on one device are cut into the given sizes, or evenly. Where they lie on several, no chunk lies on two.

    Args:
        homes: the device of each block.
        sizes: blocks per chunk, or None.
        devices: where the chunks are to go, if that is settled.

    Raises:
        ValueError: the sizes or the number of chunks do not fit the blocks, or where they lie.
    """
    runs = [len(list(run)) for _, run in groupby(homes)]
    if sizes is None and devices is None and len(runs) > 1:
        sizes = split_runs(runs, num_chunks)
    chunks = chunks_of_sizes(len(homes), sizes) if sizes else split_evenly(len(homes), num_chunks)
    if len(runs) == 1:
        return chunks
    for k, chunk in enumerate(chunks):
        found = list(dict.fromkeys(str(homes[i]) for i in chunk))
        if devices is not None and found != [str(devices[k])]:
            raise ValueError(
                f"devices={[str(device) for device in devices]} and the model's device_map disagree: chunk {k + 1}, "
                f"blocks {chunk.start} to {chunk.stop - 1}, lies on {' and '.join(found)}. Leave devices out, or load "
                "the model on one device."
            )
        if len(found) > 1:
            fitting = split_runs(runs, max(len(chunks), len(runs)))
            raise ValueError(
                f"chunk_sizes={sizes}: chunk {k + 1}, blocks {chunk.start} to {chunk.stop - 1}, would lie on "
                f"{' and '.join(found)}, and a chunk lies on one device. chunk_sizes={fitting} fits the model's "
                "device_map; leaving chunk_sizes out follows it."
            )
    return chunks


def sample_later_blocks(num_blocks: int, after: int, count: int, kind: str) -> list[int]:
    """The blocks of a readout: `count` of the blocks `after` .. num_blocks - 1, in order (fewer where fewer are left).

    Args:
        kind: `"even"` (spread evenly, the last block always among them), `"next"` (the first ones) or `"last"`.
    """
    later = list(range(after, num_blocks))
    count = min(count, len(later))
    if count == 0:
        return []
    if kind == "next":
        return later[:count]
    if kind == "last":
        return later[len(later) - count :]
    step = len(later) / count
    return [later[round((i + 1) * step) - 1] for i in range(count)]


@dataclass
class Load:
    """What a split must balance; units are the caller's.

    Attributes:
        cost: of each block.
        extra_cost: of each chunk, whichever blocks it has (readout, head).
        size: of each block.
        extra_size: of each chunk.
    """

    cost: Sequence[float]
    extra_cost: Sequence[float]
    size: Sequence[float]
    extra_size: Sequence[float]


def split_by_load(load: Load, speeds: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Chunk sizes, one chunk per device in order, whose slowest device takes the least time.

    Of the splits that fit into the devices' memory the fastest is taken, and the most even of those that are equally
    fast. Where none fits, the fullest device is as little over its capacity as can be.

    Args:
        speeds: cost per unit of time of each chunk's device.
        capacities: size that it can hold; `math.inf` for any.

    Raises:
        ValueError: more chunks than blocks.
    """
    blocks, chunks = len(load.cost), len(load.extra_cost)
    if not 1 <= chunks <= blocks:
        raise ValueError(f"{chunks} chunks cannot be made of {blocks} blocks: use 1 to {blocks} devices.")
    cost, size = ([0.0, *accumulate(values)] for values in (load.cost, load.size))

    def rank(k: int, start: int, stop: int) -> tuple[float, float, float]:
        """Excess over the capacity, time, and its square: what is compared, in this order."""
        held = size[stop] - size[start] + load.extra_size[k]
        time = (cost[stop] - cost[start] + load.extra_cost[k]) / speeds[k]
        return max(held / capacities[k] - 1, 0.0), time, time**2

    best: dict[int, tuple[tuple[float, float, float], list[int]]] = {0: ((0.0, 0.0, 0.0), [])}
    for k in range(chunks):
        following: dict[int, tuple[tuple[float, float, float], list[int]]] = {}
        for start, (worst, sizes) in best.items():
            last = blocks - (chunks - 1 - k)
            for stop in range(start + 1 if k < chunks - 1 else blocks, last + 1):
                own = rank(k, start, stop)
                ranked = (max(worst[0], own[0]), max(worst[1], own[1]), worst[2] + own[2])
                if stop not in following or ranked < following[stop][0]:
                    following[stop] = (ranked, [*sizes, stop - start])
        best = following
    return best[blocks][1]
