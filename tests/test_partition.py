import pytest

from peft_zerolock.partition import chunks_of_sizes, sample_later_blocks, split_evenly


@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("num_chunks", range(1, 9))
def test_every_block_is_in_exactly_one_chunk(num_blocks, num_chunks):
    if num_chunks > num_blocks:
        with pytest.raises(ValueError, match=f"num_chunks={num_chunks}: the model has {num_blocks} block"):
            split_evenly(num_blocks, num_chunks)
        return
    chunks = split_evenly(num_blocks, num_chunks)
    sizes = [len(chunk) for chunk in chunks]
    assert [i for chunk in chunks for i in chunk] == list(range(num_blocks))
    assert len(chunks) == num_chunks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_fewer_than_one_chunk_is_refused():
    with pytest.raises(ValueError, match="num_chunks=0"):
        split_evenly(4, 0)


def test_given_sizes():
    assert chunks_of_sizes(6, [1, 3, 2]) == [range(0, 1), range(1, 4), range(4, 6)]
    with pytest.raises(ValueError, match=r"adds up to 5, but the model has 6 blocks"):
        chunks_of_sizes(6, [3, 2])


@pytest.mark.parametrize(("kind", "expected"), [("even", [19, 29]), ("next", [10, 11]), ("last", [28, 29])])
def test_which_later_blocks(kind, expected):
    assert sample_later_blocks(30, 10, 2, kind) == expected


@pytest.mark.parametrize("kind", ["even", "next", "last"])
@pytest.mark.parametrize("after", range(0, 6))
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_later_blocks_are_distinct_in_order_and_no_more_than_there_are(kind, after, count):
    chosen = sample_later_blocks(6, after, count, kind)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, 6 - after)
    assert all(after <= i < 6 for i in chosen)
