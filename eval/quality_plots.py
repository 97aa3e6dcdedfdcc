"""The plots of the quality suite: loss against tokens, early exits over depth, quality against memory and cost."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from comparison import Comparison, Seeds, score_name  # noqa: E402
from quality_tables import frontier, mean_over_tasks  # noqa: E402


def draw_all(comparison: Comparison, folder: Path) -> list[Path]:
    """Draws every plot for which there are results into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for experiment, methods in sorted(comparison.rows.items()):
        drawn.append(_save(_draw_losses(methods), folder / f"loss_{experiment}.png"))
        if any(result.get("exits") for seeds in methods.values() for result in seeds.values()):
            drawn.append(_save(_draw_exits(methods), folder / f"exits_{experiment}.png"))
    for family in sorted(comparison.families):
        figure = _draw_frontier(comparison, family)
        if figure is not None:
            drawn.append(_save(figure, folder / f"frontier_{family}.png"))
    return drawn


def loss_curve(seeds: Seeds) -> tuple[list[float], list[float]]:
    """Training tokens and the training loss of the whole model, mean over the seeds, at every logged step."""
    logs = [result["log"] for result in seeds.values() if result["log"]]
    if not logs:
        return [], []
    first = next(iter(seeds.values()))
    per_step = first["train_tokens"] / first["train_steps"]
    steps = [[entry["step"] * per_step for entry in log] for log in logs]
    losses = [statistics.fmean(entry["loss"] for entry in entries) for entries in zip(*logs, strict=False)]
    return steps[0][: len(losses)], losses


def exit_curve(seeds: Seeds, name: str) -> tuple[list[float], list[float]]:
    """Depth (share of the blocks) and the mean over the seeds of what each chunk's readout gives."""
    by_depth: dict[float, list[float]] = {}
    for result in seeds.values():
        for found in result.get("exits", []):
            by_depth.setdefault(found["depth"], []).append(found[name])
    return sorted(by_depth), [statistics.fmean(by_depth[depth]) for depth in sorted(by_depth)]


def _draw_losses(methods: dict[str, Seeds]) -> plt.Figure:
    figure, axes = _axes(methods, "training tokens", "training loss of the whole model")
    for seeds in methods.values():
        axes.plot(*loss_curve(seeds), label=_label(seeds), linewidth=1)
    return figure


def _draw_exits(methods: dict[str, Seeds]) -> plt.Figure:
    first = next(iter(next(iter(methods.values())).values()))
    name = score_name(first) or "nll"
    figure, axes = _axes(methods, "depth (share of the blocks)", f"{name} of the readout there")
    for method, seeds in methods.items():
        curve = exit_curve(seeds, name)
        if curve[0]:
            axes.plot(*curve, marker="o", label=_label(seeds))
        elif method == "bp":
            value = statistics.fmean(result[name] for result in seeds.values())
            axes.axhline(value, color="black", linestyle=":", label=_label(seeds))
    return figure


def _draw_frontier(comparison: Comparison, family: str) -> plt.Figure | None:
    summary = mean_over_tasks(comparison, family)
    wanted = ("nll minus BP's", "activations", "CPU")
    points = {
        method: [statistics.fmean(own[key]) for key in wanted]
        for method, own in summary.items()
        if all(own[key] for key in wanted)
    }
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(8, 5))
    best = frontier(summary)
    shown = axes.scatter(
        [held for _, held, _ in points.values()],
        [nll for nll, _, _ in points.values()],
        c=[cost for _, _, cost in points.values()],
        cmap="viridis",
    )
    for method, (nll, held, _) in points.items():
        weight = "bold" if method in best else "normal"
        axes.annotate(method, (held, nll), textcoords="offset points", xytext=(4, 4), fontsize=8, fontweight=weight)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set_xlabel("activations at the peak of a step, share of BP's")
    axes.set_ylabel("NLL minus BP's, mean over tasks (bold: on the frontier)")
    figure.colorbar(shown, label="CPU time, ratio to BP's")
    return figure


def _axes(methods: dict[str, Seeds], x: str, y: str) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.set_title(next(iter(next(iter(methods.values())).values()))["config"]["title"], fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _label(seeds: Seeds) -> str:
    return next(iter(seeds.values()))["config"]["method"]["label"]


def _save(figure: plt.Figure, path: Path) -> Path:
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
