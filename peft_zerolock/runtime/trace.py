"""What the stages did when: a timeline for Perfetto or chrome://tracing, the same as a picture, and busy shares."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLORS = {"forward": "#4477aa", "send": "#cccccc", "readout": "#ccbb44", "backward": "#ee6677", "update": "#228833"}
"""The parts of a stage's work. `send` is the time in which a hidden state waits for room before the next stage."""


@dataclass
class Span:
    """A part of one stage's work; times in seconds since the trace began."""

    stage: str
    part: str
    what: str
    start: float
    end: float


class Trace:
    """Collects spans and queue depths from all workers.

    Args:
        folder: where `write` puts `timeline.json` and `timeline.png`.

    Raises:
        ValueError: matplotlib, which draws the picture, is not installed.
    """

    def __init__(self, folder: str):
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"trace={folder!r} draws a picture with matplotlib, which is not installed: pip install matplotlib, "
                "or leave trace out."
            ) from error
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Starts anew."""
        self.spans_done: list[Span] = []
        self.depths: list[tuple[float, str, int]] = []
        self._began = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def spans(self, stage: str, what: str, computed: Callable[[], None]) -> Callable[[str], None]:
        """A stage begins to work on `what`.

        Args:
            computed: returns when the device has computed what it was given so far.

        Returns:
            To be called with the name of each part of the work when it is done.
        """
        start = self._now()

        def did(part: str) -> None:
            nonlocal start
            computed()
            end = self._now()
            with self._lock:
                self.spans_done.append(Span(stage, part, what, start, end))
            start = end

        return did

    def depth(self, stage: str, entries: int) -> None:
        """How many entries wait before a stage now."""
        with self._lock:
            self.depths.append((self._now(), stage, entries))

    @property
    def busy(self) -> dict[str, float]:
        """For each stage, the share of the traced time in which it worked (waiting for room is no work)."""
        if not self.spans_done:
            return {}
        whole = max(s.end for s in self.spans_done) - min(s.start for s in self.spans_done)
        shares = dict.fromkeys(sorted({s.stage for s in self.spans_done}), 0.0)
        for span in self.spans_done:
            shares[span.stage] += (span.end - span.start) / whole if span.part != "send" else 0.0
        return shares

    @property
    def mean_depth(self) -> dict[str, float]:
        """For each stage, the mean number of entries that another one found or left before it."""
        found: dict[str, list[int]] = {}
        for _, stage, entries in self.depths:
            found.setdefault(stage, []).append(entries)
        return {stage: sum(entries) / len(entries) for stage, entries in sorted(found.items())}

    def events(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format (times in microseconds)."""
        number = {stage: index for index, stage in enumerate(self.busy)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": stage}}
            for stage, tid in number.items()
        ]
        for span in self.spans_done:
            times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
            events.append(
                {"ph": "X", "name": span.part, "pid": 0, "tid": number[span.stage], "args": {"of": span.what}} | times
            )
        for at, stage, entries in self.depths:
            counter = {"ph": "C", "name": f"waiting before {stage}", "pid": 0, "args": {"entries": entries}}
            events.append(counter | {"ts": 1e6 * at})
        return {"traceEvents": events, "otherData": {"busy": self.busy, "mean queue depth": self.mean_depth}}

    def write(self) -> None:
        """Writes `timeline.json` and `timeline.png`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "timeline.json").write_text(json.dumps(self.events()), encoding="utf-8")
        self.draw().savefig(self.folder / "timeline.png", dpi=120)

    def draw(self) -> Any:
        """The timeline as a matplotlib figure: one row a stage, one color a part of its work."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        busy = self.busy
        figure = Figure(figsize=(14, 1.5 + 0.7 * len(busy)), layout="constrained")
        axes = figure.subplots()
        for row, stage in enumerate(busy):
            for part, color in COLORS.items():
                bars = [(s.start, s.end - s.start) for s in self.spans_done if (s.stage, s.part) == (stage, part)]
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
        axes.set_yticks(range(len(busy)), [f"{stage}\nbusy {share:.0%}" for stage, share in busy.items()])
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.legend(handles=[Patch(color=c, label=part) for part, c in COLORS.items()], ncols=len(COLORS))
        return figure
