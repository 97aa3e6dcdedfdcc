"""The results of the quality suite, sorted: the rows at each method's own learning rate, and pairs within a seed."""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).with_name("quality")))
from rows import LOSSES, best_rate, mean_losses  # noqa: E402

Seeds = dict[int, dict]
"""Seed -> result, for one method of one experiment."""
SCORES = ("accuracy", "pearson")
"""What a task's main score may be called; higher is better."""
MORE_SCORES = {"matthews_correlation": "Matthews", "f1": "F1", "spearmanr": "Spearman"}
"""Further scores that a result may have, and their headings."""


def load_results(folder: Path) -> list[dict]:
    """All results in `folder`, by file name.

    Results of the first round, which had one learning rate and no families, are filled up with what follows from that.

    Raises:
        ValueError: if the folder has none, or a file is no result.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        absent = {"experiment", "method", "seed", "status"} - set(result)
        if absent:
            raise ValueError(f"{path.name} is not a result of the quality suite: it lacks {sorted(absent)}.")
        rate = result.get("config", {}).get("training", {}).get("learning_rate")
        results.append({"family": result["experiment"], "learning_rate": rate, "tuning": False, **result})
    if not results:
        raise ValueError("There are no results to report; run eval/quality/run_queue.py first.")
    return results


def rank(method: str) -> tuple[bool, bool, str]:
    """Sorts BP first, then the last chunk only, then the others by name."""
    return method != "bp", not method.startswith("last"), method


class Comparison:
    """Results by family, experiment, method and seed, tuning rows apart.

    Attributes:
        failed: the failed rows, tuning rows among them.
        tuning: (family, method) -> learning rate -> mean loss on held-out training rows.
        rows: experiment -> method -> seed -> result, each method at its own best rate, methods in the order of `rank`.
        families: family -> its experiments.
    """

    def __init__(self, results: list[dict]):
        self.failed = [result for result in results if result["status"] != "ok"]
        grids: dict[tuple[str, str], list[dict]] = {}
        for result in sorted(results, key=lambda result: rank(result["method"])):
            if result["tuning"]:
                grids.setdefault((result["family"], result["method"]), []).append(result)
        self.tuning = {key: mean_losses(grid) for key, grid in grids.items()}
        self.rows: dict[str, dict[str, Seeds]] = {}
        self.families: dict[str, list[str]] = {}
        for result in sorted(results, key=lambda result: rank(result["method"])):
            key = (result["family"], result["method"])
            rate = best_rate(self.tuning[key]) if key in self.tuning else result["learning_rate"]
            if result["status"] == "ok" and not result["tuning"] and result["learning_rate"] == rate:
                methods = self.rows.setdefault(result["experiment"], {})
                methods.setdefault(result["method"], {})[result["seed"]] = result
                own = self.families.setdefault(result["family"], [])
                own += [] if result["experiment"] in own else [result["experiment"]]

    def control(self, experiment: str, method: str) -> Seeds:
        """The rows of "last chunk only" with as many chunks as this ZeroLock method has; none for other methods."""
        methods = self.rows[experiment]
        chunks = _chunks(next(iter(methods[method].values())))
        if chunks is None or _is_control(next(iter(methods[method].values()))):
            return {}
        for seeds in methods.values():
            first = next(iter(seeds.values()))
            if _is_control(first) and _chunks(first) == chunks:
                return seeds
        return {}

    def reference(self, experiment: str, method: str) -> Seeds:
        """The rows of BP; none for BP itself."""
        return {} if method == "bp" else self.rows[experiment].get("bp", {})


def _chunks(result: dict) -> int | None:
    own = result["config"]["method"].get("zerolock")
    if own is None:
        return None
    return len(own["chunk_sizes"]) if "chunk_sizes" in own else own.get("num_chunks", 2)


def _is_control(result: dict) -> bool:
    own = result["config"]["method"].get("zerolock", {})
    return own.get("train_chunks") == [-1] and set(own) <= {"num_chunks", "chunk_sizes", "train_chunks"}


def score_name(result: dict) -> str | None:
    """The main score that the result has, if any."""
    return next((name for name in SCORES if name in result), None)


def loss_name(result: dict) -> str:
    """The loss that the result has."""
    return next(name for name in LOSSES if name in result)


def paired(seeds: Seeds, reference: Seeds, value: str) -> list[float]:
    """`value` of a method minus that of the reference, for each seed that both have."""
    return [seeds[seed][value] - reference[seed][value] for seed in sorted(seeds.keys() & reference.keys())]


def ratios(seeds: Seeds, reference: Seeds, value: str) -> list[float]:
    """`value` of a method divided by the reference's, for each seed for which both have it."""
    shared = sorted(seeds.keys() & reference.keys())
    pairs = [(seeds[seed].get(value), reference[seed].get(value)) for seed in shared]
    return [own / other for own, other in pairs if own is not None and other]


def activations(seeds: Seeds) -> list[float]:
    """Activations at the peak of a step as a share of BP's on the same batch, for each seed that has them."""
    return [r["activation_bytes"] / r["bp_activation_bytes"] for r in seeds.values() if "activation_bytes" in r]


def row_differences(seeds: Seeds, reference: Seeds, name: str) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Differences for every test row, `(seeds, rows)`, and the rows' weights; None where rows are not recorded."""
    shared = sorted(seeds.keys() & reference.keys())
    if not shared or any(_rows_of(side[seed], name) is None for side in (seeds, reference) for seed in shared):
        return None
    tokens = seeds[shared[0]].get("row_tokens")
    differences = [_rows_of(seeds[seed], name) - _rows_of(reference[seed], name) for seed in shared]
    return np.stack(differences), None if tokens is None else np.array(tokens.split(), dtype=float)


def _rows_of(result: dict, name: str) -> np.ndarray | None:
    if name == "accuracy" and "correct" in result:
        return np.array(list(result["correct"]), dtype=float)
    if name in LOSSES and "row_losses" in result:
        return np.array(result["row_losses"].split(), dtype=float)
    return None
