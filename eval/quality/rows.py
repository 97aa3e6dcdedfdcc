"""Rows (experiment, method, learning rate, seed), their result files, and the choice of a learning rate."""

import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

LOSSES = ("nll", "mse")
"""What a task's loss may be called in a result; lower is better."""


@dataclass(frozen=True)
class Row:
    """One run: a method of an experiment with one seed; `tuning` rows are scored on held-out training rows."""

    experiment: str
    method: str
    seed: int
    learning_rate: float
    tuning: bool = False

    @property
    def name(self) -> str:
        """The name of the row and, with `.json`, of its result file."""
        stage = "tune" if self.tuning else "seed"
        return f"{self.experiment}.{self.method}.lr{self.learning_rate:g}.{stage}{self.seed}"

    def result_file(self, results: Path) -> Path:
        """Where this row's result lies in the folder `results`."""
        return results / f"{self.name}.json"


def write_result(path: Path, result: dict) -> None:
    """Writes one result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial{os.getpid()}")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_result(path: Path) -> dict | None:
    """The result in `path`, or None where the row has not been run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def task_loss(result: dict) -> float:
    """The result's mean loss over its test rows; infinite for a failed row and for a loss that is not a number."""
    found = [result[name] for name in LOSSES if name in result]
    return found[0] if found and math.isfinite(found[0]) else math.inf


def mean_losses(tuning: list[dict]) -> dict[float, float]:
    """Learning rate -> mean loss over the tuning experiments, from the results of one method's tuning rows."""
    by_rate: dict[float, list[float]] = {}
    for result in tuning:
        by_rate.setdefault(result["learning_rate"], []).append(task_loss(result))
    return {rate: statistics.fmean(losses) for rate, losses in sorted(by_rate.items())}


def best_rate(losses: dict[float, float]) -> float | None:
    """The rate with the lowest mean loss; None if no rate has a finite one."""
    best = min(losses, key=lambda rate: (losses[rate], rate), default=None)
    return best if best is not None and math.isfinite(losses[best]) else None
