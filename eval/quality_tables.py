"""The tables of the quality suite, in Markdown."""

import statistics

from comparison import (
    MORE_SCORES,
    Comparison,
    Seeds,
    activations,
    loss_name,
    paired,
    rank,
    ratios,
    row_differences,
    score_name,
)
from intervals import bootstrap, show

NOTE = (
    "Mean over the seeds ± half of the 95 % interval (Student's t over the seeds; one seed has no interval). "
    "Differences are taken within a seed: same rows, batches and initial weights; in brackets the 95 % interval when "
    'seeds and test rows are both drawn anew (bootstrap). "minus last\'s": against LoRA in the last chunk only, at as '
    "many chunks. NLL in nats. Activations: held at the peak of one step on the longest training rows, as a share of "
    "BP's. CPU: CPU time of training as a ratio to BP's with the same seed, on a machine shared with other work: a "
    "rough cost, no throughput measurement."
)
HEADINGS = {"accuracy": "accuracy", "pearson": "Pearson", "nll": "NLL", "mse": "MSE"}


def quality_tables(comparison: Comparison) -> str:
    """Every table: for each family the learning rates, each task and the mean over tasks; and the rows that failed."""
    parts = []
    for family, experiments in sorted(comparison.families.items()):
        first = _first(comparison.rows[experiments[0]])
        if "family_title" in first["config"]:
            parts.append(f"### {first['config']['family_title']}")
        if len(experiments) > 1:
            parts.append(mean_table(comparison, family))
        parts += [task_table(comparison, experiment) for experiment in sorted(experiments)]
        parts += rate_table(comparison, family)
    if comparison.failed:
        lines = [f"* `{_row_name(row)}`: {row['error'].splitlines()[0][:200]}" for row in comparison.failed]
        parts.append("\n".join(["Failed rows:", "", *lines]))
    return "\n\n".join([*parts, NOTE])


def task_table(comparison: Comparison, experiment: str) -> str:
    """One task: scores, losses, differences to BP and to the last chunk only, memory and cost."""
    methods = comparison.rows[experiment]
    first = _first(methods)
    loss = loss_name(first)
    names = [name for name in (score_name(first), *MORE_SCORES, loss) if name is not None and name in first]
    compared = [name for name in (score_name(first), loss) if name is not None]
    headings = {**HEADINGS, **MORE_SCORES}
    head = ["method", "rate", "seeds", *(headings[name] for name in names)]
    head += [f"{HEADINGS[name]} minus {whose}'s" for whose in ("BP", "last") for name in compared]
    lines = []
    for method, seeds in methods.items():
        own = next(iter(seeds.values()))
        cells = [own["config"]["method"]["label"], f"{own['learning_rate']:g}", ", ".join(map(str, sorted(seeds)))]
        cells += [show([result[name] for result in seeds.values()]) for name in names]
        for other in (comparison.reference(experiment, method), comparison.control(experiment, method)):
            cells += [_difference(seeds, other, name) for name in compared]
        cells.append(_mean(activations(seeds)))
        cells.append(_mean(ratios(seeds, methods.get("bp", {}), "train_cpu_seconds")))
        lines.append(cells)
    size = f"Each row: {first['train_tokens']:,} training tokens, {first['test_size']:,} test rows."
    table = _markdown([*head, "activations", "CPU"], lines)
    return f"#### {first['config']['title']}\n\n{table}\n\n{size}{_states(methods)}"


def _difference(seeds: Seeds, other: Seeds, name: str) -> str:
    text = show(paired(seeds, other, name), sign="+")
    rows = row_differences(seeds, other, name)
    if rows is None:
        return text
    low, high = bootstrap(*rows)
    return f"{text} [{low:+.3f}, {high:+.3f}]"


def mean_table(comparison: Comparison, family: str) -> str:
    """Differences averaged over a family's tasks, with memory and cost, and who is on the frontier of the three."""
    summary = mean_over_tasks(comparison, family)
    best = frontier(summary)
    lines = []
    for method, own in summary.items():
        cells = [own["label"], str(own["tasks"]), str(len(own["nll minus BP's"]))]
        cells += [
            show(own[f"{name} minus {whose}'s"], "+") for whose in ("BP", "last") for name in ("accuracy", "nll")
        ]
        cells += [_mean(own["activations"]), _mean(own["CPU"]), "yes" if method in best else ""]
        lines.append(cells)
    head = ["method", "tasks", "pairs", "accuracy minus BP's", "NLL minus BP's", "accuracy minus last's"]
    head += ["NLL minus last's", "activations", "CPU", "frontier"]
    note = (
        "Mean over tasks: each task and seed is one pair; the interval is Student's t over the pairs. Regression has "
        "no accuracy and no NLL and is left out. Frontier: no other method is at least as good in NLL, activations "
        "and CPU."
    )
    return f"{_markdown(head, lines)}\n\n{note}"


def mean_over_tasks(comparison: Comparison, family: str) -> dict[str, dict]:
    """Method -> label, tasks, and lists over (task, seed) pairs: the differences, `activations` and `CPU`."""
    summary: dict[str, dict] = {}
    for experiment in comparison.families[family]:
        methods = comparison.rows[experiment]
        for method, seeds in methods.items():
            first = next(iter(seeds.values()))
            if "nll" not in first:
                continue
            own = summary.setdefault(method, {"label": first["config"]["method"]["label"], "tasks": 0})
            own["tasks"] += 1
            own.setdefault("activations", []).extend(activations(seeds))
            own.setdefault("CPU", []).extend(ratios(seeds, methods.get("bp", {}), "train_cpu_seconds"))
            others = {"BP": methods.get("bp", {}), "last": comparison.control(experiment, method)}
            for whose, other in others.items():
                for name in ("accuracy", "nll"):
                    pairs = paired(seeds, other, name) if name in first else []
                    own.setdefault(f"{name} minus {whose}'s", []).extend(pairs)
    return dict(sorted(summary.items(), key=lambda item: rank(item[0])))


def frontier(summary: dict[str, dict]) -> set[str]:
    """The methods that no other one matches or beats in all of NLL, activations and CPU (and differs from)."""
    points = {}
    for method, own in summary.items():
        values = [own["nll minus BP's"], own["activations"], own["CPU"]]
        if all(values):
            points[method] = tuple(statistics.fmean(value) for value in values)
    return {
        method
        for method, point in points.items()
        if not any(
            other != point and all(theirs <= mine for theirs, mine in zip(other, point, strict=True))
            for other in points.values()
        )
    }


def rate_table(comparison: Comparison, family: str) -> list[str]:
    """The held-out losses from which each method's learning rate follows; nothing where no method was tuned."""
    grids = {method: grid for (name, method), grid in comparison.tuning.items() if name == family}
    if not grids:
        return []
    rates = sorted({rate for grid in grids.values() for rate in grid})
    lines = []
    for method, grid in grids.items():
        best = min(grid.values())
        cells = [f"{grid[rate]:.3f}" if rate in grid else "-" for rate in rates]
        cells = [f"**{cell}**" if grid.get(rate) == best else cell for rate, cell in zip(rates, cells, strict=True)]
        lines.append([f"`{method}`", *cells])
    title = "Learning rates: mean loss on training rows that were held out and not trained on; the best in bold."
    return [f"{title}\n\n{_markdown(['method', *(f'{rate:g}' for rate in rates)], lines)}"]


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f}" if values else "-"


def _first(methods: dict[str, Seeds]) -> dict:
    return next(iter(next(iter(methods.values())).values()))


def _row_name(row: dict) -> str:
    stage = "tuning seed" if row["tuning"] else "seed"
    return f"{row['experiment']}, {row['method']}, rate {row['learning_rate']}, {stage} {row['seed']}"


def _states(methods: dict[str, Seeds]) -> str:
    """Warnings where rows of one table did not all run the same code, or one method not the same settings."""
    commits: dict[str, str] = {}
    changed = []
    for method, seeds in methods.items():
        settings = {repr({**result["config"]["method"], "label": None}) for result in seeds.values()}
        changed += [method] if len(settings) > 1 else []
        for result in seeds.values():
            if result["config"]["method"]["trainer"] == "zerolock":
                commits.setdefault(result["package_sha256"], result["git_commit"][:7])
    text = ""
    if len(commits) > 1:
        text += (
            f" The ZeroLock rows ran {len(commits)} states of the package: at or after {', '.join(commits.values())}."
        )
    return text + (f" Not the same settings for every seed: {', '.join(changed)}." if changed else "")
