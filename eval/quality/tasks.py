"""Tasks with a head on the model: which rows, how they become batches, how the trained model is scored."""

import hashlib
import importlib.util
import json
import random
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes"))
from metrics import METRICS, glue_metrics  # noqa: E402


def locate_model(model: dict) -> tuple[Path, dict]:
    """Returns the folder of a `model:` entry and the extra arguments that `from_pretrained` needs for it."""
    if "path" in model:
        return Path(model["path"]), {}
    spec = importlib.util.find_spec(model["package"])
    if spec is None:
        raise ValueError(f"The model's wheel {model['package']!r} is not installed; `make setup` installs it.")
    folder = Path(spec.submodule_search_locations[0]) / model.get("folder", "")
    return folder, {"gguf_file": model["gguf_file"]} if "gguf_file" in model else {}


def read_rows(data: dict, root: Path, name: str) -> list[dict]:
    """All rows of one file in the order of a shuffle with `selection_seed`."""
    path = root / data["folder"] / name
    if not path.exists():
        raise ValueError(f"No data at {data['folder']}/{name} under the data root; give the root with --data.")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(data["selection_seed"]).shuffle(rows)
    return rows


def select_rows(data: dict, root: Path, tuning: bool) -> tuple[list[dict], dict[str, list[dict]]]:
    """Returns the training rows and the test rows by file: the same for every method and seed.

    A tuning run is scored on the last `tune_size` rows of the shuffled training file and trains on none of them.

    Raises:
        ValueError: if there are fewer rows than were asked for.
    """
    train = read_rows(data, root, data["train_file"])
    size, held_out = data["train_size"], data["tune_size"]
    if (size or 0) > len(train) or held_out >= len(train):
        raise ValueError(
            f"train_size is {size} and tune_size {held_out}, but {data['train_file']} has {len(train)} rows; ask for "
            "at most that, and hold out fewer."
        )
    if tuning:
        return train[: len(train) - held_out][:size], {data["train_file"]: train[len(train) - held_out :]}
    test = {name: read_rows(data, root, name) for name in data["test_files"]}
    limit, found = data["test_size"], sum(map(len, test.values()))
    if limit is None:
        return train[:size], test
    if limit > found or len(test) != 1:
        raise ValueError(f"test_size is {limit}, for one test file with at least that many rows, or null for all.")
    return train[:size], {name: rows[:limit] for name, rows in test.items()}


class Task(ABC):
    """Data, batches and scoring of one experiment; the subclasses are the kinds.

    Args:
        spec: the settings of a row (`specs.Suite.settings`).
        root: the folder that holds the data sets.
        tuning: score on held-out training rows.
    """

    task_type: str
    score_batch = 32

    def __init__(self, spec: dict, root: Path, tuning: bool = False):
        self.spec = spec
        if spec.get("glue", "cola") not in METRICS:
            raise ValueError(f"glue is {spec['glue']!r}; use one of {', '.join(METRICS)}, or leave it out.")
        self.folder, self.load_arguments = locate_model(spec["model"])
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, **self.load_arguments)
        self.train_rows, self.files = select_rows(spec["data"], root, tuning)
        self.test_rows = [row for rows in self.files.values() for row in rows]

    def texts(self, row: dict) -> list[str]:
        """The row's text, or its pair of texts."""
        names = self.spec["data"]["text"]
        return [row[name] for name in ([names] if isinstance(names, str) else names)]

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the rows used, in their order, and of the model's weight file."""
        hashes = {}
        for name, rows in (("train", self.train_rows), ("test", self.test_rows)):
            text = "\n".join(json.dumps(row, sort_keys=True) for row in rows)
            hashes[f"{name}_rows"] = hashlib.sha256(text.encode()).hexdigest()
        weights = self.folder / self.load_arguments.get("gguf_file", "model.safetensors")
        hashes["model_weights"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        return hashes

    @torch.no_grad()
    def outputs(self, model: torch.nn.Module, limit: int | None = None) -> torch.Tensor:
        """What `read` gives for the first `limit` test rows, or for all."""
        model.eval()
        rows = self.test_rows[:limit]
        ids = [self.test_ids(row) for row in rows]
        by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        parts = []
        for start in range(0, len(ids), self.score_batch):
            chosen = by_length[start : start + self.score_batch]
            batch = self.tokenizer.pad({"input_ids": [ids[index] for index in chosen]}, return_tensors="pt")
            parts.append(self.read(model, batch, [rows[index] for index in chosen]).float())
        return torch.cat(parts)[torch.tensor(by_length).argsort()]

    def score(self, model: torch.nn.Module) -> dict:
        """Metrics over all test rows and for each file, and what every single row gave, of the plain model."""
        outputs = self.outputs(model)
        result = {**self.measure(outputs, self.test_rows), **self.details(outputs, self.test_rows), "files": {}}
        start = 0
        for name, rows in self.files.items():
            result["files"][name] = {"rows": len(rows), **self.measure(outputs[start : start + len(rows)], rows)}
            start += len(rows)
        return result

    def glue(self, predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """The metrics that GLUE gives this task, if `glue` names it."""
        if "glue" not in self.spec:
            return {}
        return glue_metrics(self.spec["glue"], predictions.numpy(), labels.numpy())

    # ---- what a kind of task says ----

    @abstractmethod
    def load_model(self) -> torch.nn.Module:
        """The base model."""

    @abstractmethod
    def train_dataset(self) -> Dataset:
        """Columns input_ids and length (tokens), and what the collator needs."""

    @abstractmethod
    def collator(self, trainer: str) -> Any:
        """Makes batches for this trainer."""

    @abstractmethod
    def test_ids(self, row: dict) -> list[int]:
        """The tokens that the model reads when it is scored."""

    @abstractmethod
    def read(self, model: torch.nn.Module, batch: dict, rows: list[dict]) -> torch.Tensor:
        """What is kept of the model's output, `(rows, ...)`."""

    @abstractmethod
    def row_losses(self, outputs: torch.Tensor, rows: list[dict]) -> torch.Tensor:
        """Each row's loss, `(rows,)`."""

    @abstractmethod
    def measure(self, outputs: torch.Tensor, rows: list[dict]) -> dict[str, float]:
        """The metrics over these rows."""

    def details(self, outputs: torch.Tensor, rows: list[dict]) -> dict:
        """One figure for every row, compactly: the losses to 4 decimals in one string."""
        return {"row_losses": compact(self.row_losses(outputs, rows), 4)}


class Labelled(Task):
    """Each test row has a label among `num_classes`; the outputs are logits, `(rows, num_classes)`."""

    def row_losses(self, outputs: torch.Tensor, rows: list[dict]) -> torch.Tensor:
        return cross_entropy(outputs, labels_of(rows), reduction="none")

    def measure(self, outputs: torch.Tensor, rows: list[dict]) -> dict[str, float]:
        """Accuracy, mean NLL (nats) and GLUE's metrics."""
        predictions, labels = outputs.argmax(-1), labels_of(rows)
        scores = {"accuracy": (predictions == labels).float().mean().item()} | self.glue(predictions, labels)
        return scores | {"nll": self.row_losses(outputs, rows).mean().item()}

    def details(self, outputs: torch.Tensor, rows: list[dict]) -> dict:
        """One 0/1 character and one loss a row."""
        right = outputs.argmax(-1) == labels_of(rows)
        return {"correct": "".join(str(int(answer)) for answer in right), **super().details(outputs, rows)}


class Headed(Task):
    """The model's own pooler and head on one text or a pair."""

    task_type = "SEQ_CLS"

    @property
    def num_classes(self) -> int:
        return len({row["label"] for row in self.train_rows})

    def load_model(self) -> torch.nn.Module:
        """The base model; refuses newly initialised modules that no method would train."""
        model, info = AutoModelForSequenceClassification.from_pretrained(
            self.folder, num_labels=self.num_classes, dtype=torch.float32, output_loading_info=True
        )
        trained = set(self.spec["lora"].get("modules_to_save", []))
        left = [key for key in info["missing_keys"] if not trained & set(key.split("."))]
        if left:
            raise ValueError(f"Newly initialised and not trained: {left}; name their module in lora.modules_to_save.")
        return model

    def train_dataset(self) -> Dataset:
        """Columns input_ids, labels, length."""
        ids = [self.test_ids(row) for row in self.train_rows]
        return Dataset.from_dict(
            {"input_ids": ids, "labels": [row["label"] for row in self.train_rows], "length": list(map(len, ids))}
        )

    def collator(self, trainer: str) -> Any:
        """Pads to the longest text of the batch; the same for every trainer."""

        def collate(rows: list[dict]) -> dict:
            batch = dict(self.tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt"))
            return batch | {"labels": torch.tensor([row["labels"] for row in rows])}

        return collate

    def test_ids(self, row: dict) -> list[int]:
        return self.tokenizer(*self.texts(row), truncation=True, max_length=self.spec["max_tokens"])["input_ids"]

    def read(self, model: torch.nn.Module, batch: dict, rows: list[dict]) -> torch.Tensor:
        return model(**batch).logits


class Classification(Headed, Labelled):
    """Classes of a text or a pair."""


class Regression(Headed):
    """One number for a text or a pair, trained with the squared error."""

    num_classes = 1

    def row_losses(self, outputs: torch.Tensor, rows: list[dict]) -> torch.Tensor:
        return (outputs.squeeze(-1) - labels_of(rows)) ** 2

    def measure(self, outputs: torch.Tensor, rows: list[dict]) -> dict[str, float]:
        """GLUE's correlations and the mean squared error."""
        scores = self.glue(outputs.squeeze(-1), labels_of(rows))
        return scores | {"mse": self.row_losses(outputs, rows).mean().item()}


def labels_of(rows: list[dict]) -> torch.Tensor:
    """The labels, `(rows,)`."""
    return torch.tensor([row["label"] for row in rows])


def compact(values: torch.Tensor, decimals: int) -> str:
    """The values as one string, separated by spaces."""
    return " ".join(f"{value:.{decimals}f}" for value in values.tolist())
