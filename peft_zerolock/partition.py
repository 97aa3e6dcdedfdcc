"""Which blocks form which chunk."""


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
