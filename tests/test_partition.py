import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_zerolock.partition import (
    Load,
    chunks_of_sizes,
    cut,
    sample_later_blocks,
    split_by_load,
    split_evenly,
    split_runs,
)


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


def test_split_by_load_with_known_answers():
    inf = math.inf
    blocks = Load([1.0] * 6, [0.0, 0.0], [1.0] * 6, [0.0, 0.0])
    assert split_by_load(blocks, [1, 1], [inf, inf]) == [3, 3]
    assert split_by_load(blocks, [1, 2], [inf, inf]) == [2, 4]
    assert split_by_load(blocks, [1, 1], [2, inf]) == [2, 4]  # memory before speed
    assert split_by_load(blocks, [1, 1], [2, 3]) in ([2, 4], [3, 3])  # too small together: as little over as can be
    head = Load([1.0] * 6, [0.0, 0.0, 2.0], [1.0] * 6, [0.0] * 3)
    assert split_by_load(head, [1, 1, 1], [inf] * 3) in ([3, 2, 1], [2, 3, 1])
    uneven = Load([4.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0], [1.0] * 5, [0.0, 0.0])
    assert split_by_load(uneven, [1, 1], [inf, inf]) == [1, 4]
    with pytest.raises(ValueError, match="3 chunks cannot be made of 2 blocks"):
        split_by_load(Load([1.0] * 2, [0.0] * 3, [1.0] * 2, [0.0] * 3), [1] * 3, [inf] * 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=7),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(4, 30)), min_size=1, max_size=3),
)
def test_no_other_split_is_better(costs, chunks):
    extra, speeds, room = ([part[i] for part in chunks] for i in range(3))
    sizes = [c % 4 + 1 for c in costs]

    def rank(split):
        bounds = [0, *itertools.accumulate(split)]
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        over = max(max(sum(sizes[p]) / r - 1, 0) for p, r in zip(parts, room, strict=True))
        return over, max((sum(costs[p]) + e) / s for p, e, s in zip(parts, extra, speeds, strict=True))

    count = len(chunks)
    every = [s for s in itertools.product(range(1, len(costs) + 1), repeat=count) if sum(s) == len(costs)]
    found = split_by_load(Load(costs, extra, sizes, [0] * count), speeds, room)
    assert rank(found) == pytest.approx(min(rank(split) for split in every))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_runs_are_cut_by_themselves_and_as_evenly_as_can_be(runs, data):
    number = data.draw(st.integers(len(runs), sum(runs)))
    sizes = split_runs(runs, number)
    assert len(sizes) == number and min(sizes) >= 1
    ends = set(itertools.accumulate(sizes))
    assert ends >= set(itertools.accumulate(runs))  # no chunk lies in two runs
    everything = itertools.product(*(range(1, run + 1) for run in runs))
    fitting = [counts for counts in everything if sum(counts) == number]
    assert max(sizes) == min(max(-(-r // c) for r, c in zip(runs, counts, strict=True)) for counts in fitting)


def test_cuts_follow_the_devices_of_the_blocks():
    homes = ["a"] * 2 + ["b"] * 4
    assert [len(chunk) for chunk in cut(homes, None, 2)] == [2, 4]
    assert [len(chunk) for chunk in cut(homes, None, 3)] == [2, 2, 2]
    assert [len(chunk) for chunk in cut(homes, [1, 1, 4], 3)] == [1, 1, 4]
    assert [len(chunk) for chunk in cut(homes, [2, 4], 2, ["a", "b"])] == [2, 4]
    assert [len(chunk) for chunk in cut(["a"] * 6, None, 2, ["a", "b"])] == [3, 3]
    assert [len(chunk) for chunk in cut(["a", "a", "b", "a"], None, 3)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "number", "devices", "told"),
    [
        (None, 1, None, r"num_chunks=1: the blocks lie in 2 runs of \[2, 4\].*use 2 to 6 chunks"),
        (None, 7, None, r"num_chunks=7"),
        ([3, 3], 2, None, r"chunk 1, blocks 0 to 2, would lie on a and b.*chunk_sizes=\[2, 4\] fits"),
        ([6], 1, None, r"chunk_sizes=\[2, 4\] fits"),
        ([3, 3], 2, ["a", "b"], r"disagree: chunk 1, blocks 0 to 2, lies on a and b"),
        ([2, 4], 2, ["b", "a"], r"disagree: chunk 1, blocks 0 to 1, lies on a\."),
    ],
)
def test_chunks_on_two_devices_are_refused(sizes, number, devices, told):
    with pytest.raises(ValueError, match=told):
        cut(["a"] * 2 + ["b"] * 4, sizes, number, devices)
