"""The timeline of a concurrent run: what it holds, how busy shares come about, and the picture."""

import json

import pytest
from small_runs import make_trainer

from peft_zerolock.runtime import Trace
from peft_zerolock.runtime.trace import COLORS, Span


def test_a_run_writes_its_timeline(tmp_path):
    folder = tmp_path / "deep" / "trace"
    run = {"max_steps": 3, "logging_steps": 3, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, runtime="concurrent", trace=str(folder), **run)
    trainer.train()
    timeline = json.loads((folder / "timeline.json").read_text())
    work = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    of = {(event["tid"], event["name"], event["args"]["of"]) for event in work}
    for number in range(1, 7):
        assert {part for tid, part, what in of if (tid, what) == (0, f"micro-batch {number}")} == {
            *("forward", "send", "readout", "backward")
        }
        assert {part for tid, part, what in of if (tid, what) == (1, f"micro-batch {number}")} == {
            "forward",
            "backward",
        }
    assert {(tid, what) for tid, part, what in of if part == "update"} == {
        (tid, f"window {number}") for tid in (0, 1) for number in (1, 2, 3)
    }
    named = {event["args"]["name"]: event["tid"] for event in timeline["traceEvents"] if event["ph"] == "M"}
    assert named == {"chunk_1": 0, "chunk_2": 1}
    for tid in (0, 1):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == tid)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert set(timeline["otherData"]["busy"]) == {"chunk_1", "chunk_2"}
    assert all(0 < share <= 1 for share in timeline["otherData"]["busy"].values())
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_waiting_for_room_is_no_work(tmp_path):
    trace = Trace(str(tmp_path))
    trace.spans_done = [
        *(Span("chunk_1", "forward", "1", 0.0, 1.0), Span("chunk_1", "send", "1", 1.0, 3.0)),
        *(Span("chunk_1", "backward", "1", 3.0, 4.0), Span("chunk_2", "forward", "1", 1.0, 2.0)),
    ]
    assert trace.busy == pytest.approx({"chunk_1": 0.5, "chunk_2": 0.25})


def test_the_mean_depth_is_over_all_that_were_seen(tmp_path):
    trace = Trace(str(tmp_path))
    for entries in (1, 2, 0):
        trace.depth("chunk_2", entries)
    assert trace.mean_depth == {"chunk_2": 1.0}
    trace.begin()
    assert trace.mean_depth == {} and trace.busy == {}


def test_each_part_has_a_color_in_the_picture(tmp_path):
    trace = Trace(str(tmp_path))
    trace.spans_done = [Span("chunk_1", part, "1", float(i), i + 1.0) for i, part in enumerate(COLORS)]
    axes = trace.draw().axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(COLORS)
    assert sum(len(bars.get_paths()) for bars in axes.collections) == len(COLORS)
