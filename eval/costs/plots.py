"""Plots of the memory and throughput results."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from counting import CATEGORIES  # noqa: E402
from tables import MIB, at_batch, label, load_results, speeds  # noqa: E402


def draw(results: Path) -> list[Path]:
    """Draws one plot for each result into `results/plots/KIND/`; returns the files."""
    made = []
    for kind, plot in (("memory", _memory), ("throughput", _throughput)):
        folder = results / "plots" / kind
        for result in load_results(results / kind):
            folder.mkdir(parents=True, exist_ok=True)
            figure = plot(result)
            made.append(folder / f"{result['experiment']}.png")
            figure.savefig(made[-1], dpi=110, bbox_inches="tight", metadata={"Software": None})
            plt.close(figure)
    return made


def _memory(result: dict[str, Any]) -> Any:
    """Bytes by category at the worst moment, without the base weights, which are the same for all."""
    rows = at_batch(result)
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.4))
    names = [label(result, name) for name in rows]
    left = [0.0] * len(rows)
    for category in CATEGORIES[1:]:
        sizes = [row["at_peak"][category] / MIB for row in rows.values()]
        axes.barh(names, sizes, left=left, label=category)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MiB at the worst moment of a step, base weights left out")
    axes.set_title(result["config"]["title"])
    axes.legend(fontsize=7)
    return figure


def _throughput(result: dict[str, Any]) -> Any:
    """Tokens per CPU second against BP: each round, and the median."""
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.4))
    for place, row in enumerate(rows):
        found = speeds(result, "bp", row["method"])
        axes.plot(found, [place] * len(found), ".", color="tab:gray")
        axes.plot(statistics.median(found), place, "d", color="tab:blue")
    axes.set_yticks(range(len(rows)), [label(result, row["method"]) for row in rows])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("tokens per CPU second, of BP's (dots: rounds)")
    axes.set_title(result["config"]["title"])
    return figure
