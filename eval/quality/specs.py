"""Reads and checks `experiments.yaml`, and names the rows (experiment, method, seed) and their result files."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = Path(__file__).with_name("experiments.yaml")
RESULTS = ROOT / "eval" / "results" / "quality"
DATA = ROOT.parent / "shared" / "data"

KINDS = ("classification", "answer_token")
TRAINERS = ("bp", "zerolock")
REQUIRED = {"title", "kind", "model", "data", "max_tokens", "lora", "training", "methods"}
OPTIONAL = {"prompt_end", "answers"}
DATA_KEYS = {"folder", "text", "train_file", "train_size", "test_file", "test_size", "selection_seed"}
METHOD_KEYS = {"label", "trainer", "lora", "zerolock"}


@dataclass(frozen=True)
class Row:
    """One line of a results table: a method of an experiment with one seed."""

    experiment: str
    method: str
    seed: int

    def result_file(self, results: Path) -> Path:
        """Where this row's result lies in the folder `results`."""
        return results / f"{self.experiment}.{self.method}.seed{self.seed}.json"


def load_experiments(path: Path = EXPERIMENTS) -> tuple[dict[str, dict], list[Row]]:
    """Returns the checked experiments by name and the rows in the queue's order.

    Raises:
        ValueError: with the experiment, the key and what is allowed, if the file is not as its header describes.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or set(content) != {"experiments", "order"}:
        raise ValueError(f"{path.name}: expected exactly the keys `experiments` and `order`.")
    for name, spec in content["experiments"].items():
        _check_experiment(f"{path.name}, {name}", spec)
    return content["experiments"], _rows(path.name, content["experiments"], content["order"])


def _check_experiment(where: str, spec: dict) -> None:
    missing, unknown = REQUIRED - set(spec), set(spec) - REQUIRED - OPTIONAL
    if missing or unknown:
        raise ValueError(f"{where}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}.")
    if spec["kind"] not in KINDS:
        raise ValueError(f"{where}: kind is {spec['kind']!r}; use one of {KINDS}.")
    if set(spec["data"]) != DATA_KEYS:
        raise ValueError(f"{where}: `data` needs exactly the keys {sorted(DATA_KEYS)}, got {sorted(spec['data'])}.")
    if spec["kind"] == "answer_token" and not {"prompt_end", "answers"} <= set(spec):
        raise ValueError(f"{where}: an answer_token experiment needs `prompt_end` and `answers`.")
    for name, method in spec["methods"].items():
        if not {"label", "trainer"} <= set(method) <= METHOD_KEYS:
            raise ValueError(f"{where}, {name}: a method has label, trainer and, if wanted, lora and zerolock.")
        if method["trainer"] not in TRAINERS:
            raise ValueError(f"{where}, {name}: trainer is {method['trainer']!r}; use one of {TRAINERS}.")
        if ("zerolock" in method) != (method["trainer"] == "zerolock"):
            raise ValueError(f"{where}, {name}: `zerolock` settings belong to trainer: zerolock, and only there.")


def _rows(where: str, experiments: dict[str, dict], order: list[dict]) -> list[Row]:
    rows = []
    for line in order:
        if line["experiment"] not in experiments:
            raise ValueError(f"{where}, order: no experiment {line['experiment']!r}; there are {sorted(experiments)}.")
        methods = experiments[line["experiment"]]["methods"]
        unknown = set(line["methods"]) - set(methods)
        if unknown:
            raise ValueError(f"{where}, order: {line['experiment']} has no methods {sorted(unknown)}.")
        rows += [Row(line["experiment"], method, seed) for seed in line["seeds"] for method in line["methods"]]
    if len(rows) != len(set(rows)):
        raise ValueError(f"{where}, order: a row is listed twice.")
    return rows


def write_result(path: Path, result: dict) -> None:
    """Writes one result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_result(path: Path) -> dict | None:
    """The result in `path`, or None where the row has not been run."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
