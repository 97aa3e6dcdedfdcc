"""Rebuilds the tables of the evaluation, in Markdown, from the JSON results; failed rows included.

python eval/report.py                            # prints the tables
python eval/report.py --write eval/LOG.md        # puts them between the report markers of that file
"""

import argparse
import json
import statistics
from functools import cache
from pathlib import Path

import yaml
from scipy.stats import t as student

EXPERIMENTS = Path(__file__).with_name("quality") / "experiments.yaml"
RESULTS = Path(__file__).with_name("results") / "quality"
BEGIN, END = "<!-- report:begin -->", "<!-- report:end -->"
HEADER = """\
| method | seeds | accuracy | NLL | accuracy minus BP's | NLL minus BP's | CPU seconds |
| --- | --- | --- | --- | --- | --- | --- |"""
NOTE = (
    "Mean over the seeds ± half of the 95 % interval (Student's t over the seeds; one seed has no interval). "
    "Differences are taken within a seed: same rows, batches and initial head. NLL in nats. CPU seconds: the mean "
    "CPU time of the process in `train()`, one thread, on a machine shared with other work: a rough cost, no "
    "throughput measurement."
)


def load_results(folder: Path) -> list[dict]:
    """All results in `folder`, by file name.

    Raises:
        ValueError: if the folder has none, or a file is no result.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        absent = {"experiment", "method", "seed", "status"} - set(result)
        if absent:
            raise ValueError(f"{path.name} is not a result of the quality suite: it lacks {sorted(absent)}.")
        results.append(result)
    if not results:
        raise ValueError("There are no results to report; run eval/quality/run_queue.py first.")
    return results


def interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval (Student's t); no width for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def show(values: list[float], sign: str = "") -> str:
    """Values as `mean ± half width`, or as a dash if there are none."""
    if not values:
        return "-"
    mean, width = interval(values)
    return f"{mean:{sign}.3f}" + ("" if width is None else f" ± {width:.3f}")


def quality_tables(results: list[dict]) -> str:
    """One table an experiment, BP first, then the controls, then ZeroLock; and the rows that failed."""
    parts = []
    for experiment in sorted({result["experiment"] for result in results}, reverse=True):
        rows = [result for result in results if result["experiment"] == experiment]
        done = [result for result in rows if result["status"] == "ok"]
        if done:
            parts += [f"### {done[0]['config']['title']}", "\n".join([HEADER, *_lines(done)])]
            size, tokens = done[0]["test_size"], done[0]["train_tokens"]
            parts.append(f"Each row: {tokens:,} training tokens, {size:,} test rows.{_states(done)}")
        failed = [result for result in rows if result["status"] != "ok"]
        if failed:
            lines = [f"* `{row['method']}`, seed {row['seed']}: {_first_line(row['error'])}" for row in failed]
            parts.append("\n".join([f"Failed rows of {experiment}:", "", *lines]))
    return "\n\n".join([*parts, NOTE])


def _lines(done: list[dict]) -> list[str]:
    by_method: dict[str, dict[int, dict]] = {}
    for result in sorted(done, key=lambda result: _rank(result["method"])):
        by_method.setdefault(result["method"], {})[result["seed"]] = result
    reference = by_method.get("bp", {})
    lines = []
    for method, seeds in by_method.items():
        shared = [] if method == "bp" else sorted(seeds.keys() & reference.keys())
        first = next(iter(seeds.values()))
        cells = [_label(first["experiment"], method) or first["config"]["method"]["label"]]
        cells.append(", ".join(map(str, sorted(seeds))))
        cells += [show([result[metric] for result in seeds.values()]) for metric in ("accuracy", "nll")]
        for metric in ("accuracy", "nll"):
            cells.append(show([seeds[seed][metric] - reference[seed][metric] for seed in shared], sign="+"))
        seconds = [result["train_cpu_seconds"] for result in seeds.values() if "train_cpu_seconds" in result]
        cells.append(f"{statistics.fmean(seconds):.0f}" if seconds else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


@cache
def _experiments() -> dict:
    return yaml.safe_load(EXPERIMENTS.read_text(encoding="utf-8"))["experiments"]


def _label(experiment: str, method: str) -> str | None:
    """What experiments.yaml calls the method today: which settings are the defaults may have changed since the run."""
    return _experiments().get(experiment, {}).get("methods", {}).get(method, {}).get("label")


def _states(done: list[dict]) -> str:
    """A warning if the ZeroLock rows did not all run the same code."""
    commits: dict[str, str] = {}
    for result in done:
        if result["config"]["method"]["trainer"] == "zerolock":
            commits.setdefault(result["package_sha256"], result["git_commit"][:7])
    if len(commits) < 2:
        return ""
    return f" The ZeroLock rows ran {len(commits)} states of the package: at or after {', '.join(commits.values())}."


def _rank(method: str) -> tuple[bool, bool, str]:
    """BP first, then the controls, then ZeroLock."""
    return method != "bp", method.startswith("zerolock"), method


def _first_line(error: str) -> str:
    return error.splitlines()[0][:200]


def replace_report(text: str, report: str) -> str:
    """`text` with `report` between its two markers.

    Raises:
        ValueError: if the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"The file needs one line {BEGIN} and, after it, one line {END}.")
    return text[: text.index(BEGIN) + len(BEGIN)] + f"\n{report}\n" + text[text.index(END) :]


def main() -> None:
    """Prints the tables, or writes them into a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--write", type=Path, help="Markdown file whose report is replaced")
    arguments = parser.parse_args()
    report = quality_tables(load_results(arguments.results))
    if arguments.write is None:
        print(report)
    else:
        text = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(replace_report(text, report), encoding="utf-8")


if __name__ == "__main__":
    main()
