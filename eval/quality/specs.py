"""Reads and checks `experiments.yaml`: methods, families, experiments and the queue's order."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from rows import Row

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = Path(__file__).with_name("experiments.yaml")
RESULTS = ROOT / "eval" / "results" / "quality"
DATA = ROOT.parent / "shared" / "data"

KINDS = ("classification", "regression", "answer_token", "answer_loss")
TRAINERS = ("bp", "zerolock")
SECTIONS = ("methods", "families", "experiments", "order")
KEYS = {  # what each entry of a section must have, and may have
    "methods": ({"label", "trainer"}, {"lora", "zerolock"}),
    "families": ({"title", "model", "lora", "training", "learning_rates", "tune_on", "tune_seed"}, set()),
    "experiments": ({"family", "title", "kind", "data", "max_tokens"}, {"prompt_end", "answers", "glue", "training"}),
}
DATA_KEYS = {"folder", "text", "train_file", "train_size", "tune_size", "test_files", "test_size", "selection_seed"}
KIND_KEYS = {"answer_token": {"prompt_end", "answers"}, "answer_loss": {"prompt_end"}}
LINE_KEYS = {"experiments", "methods", "seeds"}


@dataclass(frozen=True)
class Suite:
    """The checked content of `experiments.yaml`; the attributes are its sections."""

    methods: dict[str, dict]
    families: dict[str, dict]
    experiments: dict[str, dict]
    order: list[dict]

    def settings(self, experiment: str, method: str) -> dict:
        """Everything that one row needs: the family's settings, the experiment's on top, and the method.

        Raises:
            ValueError: if there is no such experiment or method.
        """
        for kind, name, known in (("experiment", experiment, self.experiments), ("method", method, self.methods)):
            if name not in known:
                raise ValueError(f"There is no {kind} {name!r}; there are {', '.join(known)}.")
        own = self.experiments[experiment]
        family = self.families[own["family"]]
        return {
            **{key: family[key] for key in ("model", "lora")},
            **own,
            "training": {**family["training"], **own.get("training", {})},
            "family_title": family["title"],
            "method": self.methods[method],
        }

    def tuning_rows(self, family: str, method: str) -> list[Row]:
        """The rows that find the method's learning rate in this family; none where there is one rate only."""
        own = self.families[family]
        if len(own["learning_rates"]) == 1:
            return []
        return [
            Row(experiment, method, own["tune_seed"], rate, tuning=True)
            for experiment in own["tune_on"]
            for rate in own["learning_rates"]
        ]

    def cells(self) -> Iterator[tuple[str, str, int]]:
        """(experiment, method, seed) in the queue's order."""
        for line in self.order:
            for seed in line["seeds"]:
                for experiment in line["experiments"]:
                    yield from ((experiment, method, seed) for method in line["methods"])


def load_suite(path: Path = EXPERIMENTS) -> Suite:
    """Reads and checks the YAML file.

    Raises:
        ValueError: with the entry, the key and what is allowed, if the file is not as its header describes.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or set(content) != set(SECTIONS):
        raise ValueError(f"{path.name}: expected exactly the keys {', '.join(SECTIONS)}.")
    for section, (required, optional) in KEYS.items():
        for name, entry in content[section].items():
            where = f"{path.name}, {section}, {name}"
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"{where}: use letters, digits and underscores only; names become file names.")
            _check_keys(where, entry, required, optional)
    suite = Suite(**content)
    for name, method in suite.methods.items():
        _check_method(f"{path.name}, methods, {name}", method)
    for name, experiment in suite.experiments.items():
        _check_experiment(f"{path.name}, experiments, {name}", experiment, suite)
    for name, family in suite.families.items():
        _check_family(f"{path.name}, families, {name}", name, family, suite)
    _check_order(f"{path.name}, order", suite)
    return suite


def _check_keys(where: str, entry: dict, required: set, optional: set) -> None:
    missing, unknown = required - set(entry), set(entry) - required - optional
    if missing or unknown:
        raise ValueError(f"{where}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}.")


def _check_method(where: str, method: dict) -> None:
    if method["trainer"] not in TRAINERS:
        raise ValueError(f"{where}: trainer is {method['trainer']!r}; use one of {TRAINERS}.")
    if ("zerolock" in method) != (method["trainer"] == "zerolock"):
        raise ValueError(f"{where}: `zerolock` settings belong to trainer: zerolock, and only there.")


def _check_experiment(where: str, experiment: dict, suite: Suite) -> None:
    if experiment["family"] not in suite.families:
        raise ValueError(f"{where}: family is {experiment['family']!r}; there are {sorted(suite.families)}.")
    if experiment["kind"] not in KINDS:
        raise ValueError(f"{where}: kind is {experiment['kind']!r}; use one of {KINDS}.")
    needs = KIND_KEYS.get(experiment["kind"], set()) - set(experiment)
    if needs:
        raise ValueError(f"{where}: kind {experiment['kind']} needs the keys {sorted(needs)} too.")
    answer = {"answer"} if experiment["kind"] == "answer_loss" else set()
    _check_keys(f"{where}, data", experiment["data"], DATA_KEYS | answer, set())


def _check_family(where: str, name: str, family: dict, suite: Suite) -> None:
    rates = family["learning_rates"]
    if not rates or any(not isinstance(rate, float) or rate <= 0 for rate in rates):
        raise ValueError(f"{where}: learning_rates is {rates}; give numbers above 0, written like 1.0e-3.")
    own = [key for key, experiment in suite.experiments.items() if experiment["family"] == name]
    if not family["tune_on"] or set(family["tune_on"]) - set(own):
        raise ValueError(f"{where}: tune_on is {family['tune_on']}; name at least one experiment of {own}.")
    if "learning_rate" in family["training"]:
        raise ValueError(f"{where}: `learning_rate` belongs into learning_rates, not into training.")


def _check_order(where: str, suite: Suite) -> None:
    for line in suite.order:
        _check_keys(where, line, LINE_KEYS, set())
        for kind, known in (("experiments", suite.experiments), ("methods", suite.methods)):
            unknown = set(line[kind]) - set(known)
            if unknown:
                raise ValueError(f"{where}: there are no {kind} {sorted(unknown)}; there are {sorted(known)}.")
