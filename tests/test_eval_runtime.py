"""The simulation of stages gives the times that can be worked out by hand; the measured work runs."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval" / "runtime"))
from schedules import Times, local_seconds, pipeline_ops, pipeline_seconds
from workload import Work, learning, load_stages

from peft_zerolock.runtime import SequentialRuntime


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("windows", [1, 3])
def test_equal_stages_of_a_pipeline_have_the_textbook_bubble(stages, micro_batches, windows):
    """GPipe and 1F1B of p stages and m micro-batches take (m + p - 1) forward and backward times a window."""
    times = [Times(1.0, 2.0, 0.0)] * stages
    for schedule in ("gpipe", "1f1b"):
        seconds = pipeline_seconds(schedule, times, micro_batches, windows, 0.0)
        assert seconds == pytest.approx(windows * (micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize("depth", [1, 3])
def test_local_updates_wait_only_for_the_first_hidden_state(depth):
    times = [Times(1.0, 2.0, 0.5)] * 4
    assert local_seconds(times, 4, 5, 0.0, depth) == pytest.approx(3 * 1.0 + 20 * 3.0 + 5 * 0.5)
    assert local_seconds(times, 4, 5, 0.25, depth) == pytest.approx(3 * 1.25 + 20 * 3.0 + 5 * 0.5)


def test_a_slow_last_stage_holds_the_others_back_by_its_queue():
    """The first stage waits for room, and the run takes as long as the slowest one."""
    times = [Times(1.0, 0.0, 0.0), Times(5.0, 5.0, 0.0)]
    assert local_seconds(times, 1, 6, 0.0, depth=2) == pytest.approx(1.0 + 6 * 10.0)


def test_one_stage_does_everything_in_turn():
    times = [Times(1.0, 2.0, 0.5)]
    assert local_seconds(times, 2, 3, 9.0, 1) == pytest.approx(6 * 3.0 + 3 * 0.5)
    assert pipeline_seconds("1f1b", times, 2, 3, 9.0) == pytest.approx(6 * 3.0 + 3 * 0.5)


def test_orders_are_those_of_the_schedules():
    assert pipeline_ops("1f1b", 0, 2, 3, 1) == [
        *(("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2), ("U", 0)),
    ]
    assert pipeline_ops("1f1b", 1, 2, 2, 1) == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("U", 0)]
    assert pipeline_ops("gpipe", 1, 2, 2, 1) == [("F", 0), ("F", 1), ("B", 0), ("B", 1), ("U", 0)]


@pytest.mark.parametrize("work", [Work(), Work(readout="auto", readout_rows="auto")], ids=["paper", "defaults"])
def test_what_is_measured_runs(work):
    """SmolLM2 itself, on a few tokens: every chunk learns in some of its micro-batches."""
    work = replace(work, batch=1, micro_batches=2, length=8, supervised=4)
    _, stages = load_stages(work, 2)
    runtime = SequentialRuntime(stages, torch.Tensor.backward)
    for entry in work.entries(0):
        runtime.submit(entry, None)
    for group in learning(stages):
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in group["params"])
