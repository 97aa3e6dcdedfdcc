"""The two kinds of task: which rows, how they become batches, how the trained model is scored."""

import hashlib
import importlib.util
import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
)

SCORE_BATCH = 32


def locate_model(model: dict) -> tuple[Path, dict]:
    """Returns the folder of a `model:` entry and the extra arguments that `from_pretrained` needs for it."""
    if "path" in model:
        return Path(model["path"]), {}
    spec = importlib.util.find_spec(model["package"])
    if spec is None:
        raise ValueError(f"The model's wheel {model['package']!r} is not installed; `make setup` installs it.")
    folder = Path(spec.submodule_search_locations[0]) / model.get("folder", "")
    return folder, {"gguf_file": model["gguf_file"]} if "gguf_file" in model else {}


def select_rows(data: dict, root: Path, split: str) -> list[dict]:
    """The first rows of a seeded shuffle of one split: the same for every method and seed."""
    path = root / data["folder"] / data[f"{split}_file"]
    if not path.exists():
        raise ValueError(f"No data at {data['folder']}/{path.name} under the data root; give the root with --data.")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(data["selection_seed"]).shuffle(rows)
    size = data[f"{split}_size"]
    if size is not None and size > len(rows):
        raise ValueError(f"{split}_size is {size} but {path.name} has {len(rows)} rows; ask for at most that.")
    return rows[:size]


class Task:
    """Data, batches and scoring of one experiment; the subclasses are the kinds.

    Args:
        spec: one experiment of experiments.yaml.
        root: the folder that holds the data sets.
    """

    task_type: str

    def __init__(self, spec: dict, root: Path):
        self.spec = spec
        self.folder, self.load_arguments = locate_model(spec["model"])
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, **self.load_arguments)
        self.train_rows, self.test_rows = (select_rows(spec["data"], root, split) for split in ("train", "test"))
        self.labels = [row["label"] for row in self.test_rows]

    def encode(self, text: str) -> list[int]:
        """A training or test text as token ids, cut to `max_tokens`."""
        return self.tokenizer(text, truncation=True, max_length=self.spec["max_tokens"])["input_ids"]

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
    def score(self, model: torch.nn.Module) -> dict:
        """Accuracy, mean NLL (nats) and the answers, one 0/1 character a test row, of the plain model."""
        model.eval()
        ids = [self.test_ids(row) for row in self.test_rows]
        by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        logits = torch.empty(len(ids), self.num_classes)
        for start in range(0, len(ids), SCORE_BATCH):
            chosen = by_length[start : start + SCORE_BATCH]
            batch = self.tokenizer.pad({"input_ids": [ids[index] for index in chosen]}, return_tensors="pt")
            logits[chosen] = self.class_logits(model, batch).float()
        labels = torch.tensor(self.labels)
        correct = logits.argmax(-1) == labels
        return {
            "accuracy": correct.float().mean().item(),
            "nll": cross_entropy(logits, labels).item(),
            "correct": "".join(str(int(right)) for right in correct),
        }


class Classification(Task):
    """Sentence classification with the model's own pooler and head."""

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
        ids = [self.encode(row[self.spec["data"]["text"]]) for row in self.train_rows]
        return Dataset.from_dict(
            {"input_ids": ids, "labels": [row["label"] for row in self.train_rows], "length": list(map(len, ids))}
        )

    def collator(self, trainer: str):
        """Pads to the longest text of the batch; the same for every trainer."""

        def collate(rows: list[dict]) -> dict:
            batch = dict(self.tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt"))
            return batch | {"labels": torch.tensor([row["labels"] for row in rows])}

        return collate

    def test_ids(self, row: dict) -> list[int]:
        return self.encode(row[self.spec["data"]["text"]])

    def class_logits(self, model: torch.nn.Module, batch: dict) -> torch.Tensor:
        return model(**batch).logits


class AnswerToken(Task):
    """A causal LM reads a text and a prompt and names the class in one token; the loss is on that token alone."""

    task_type = "CAUSAL_LM"

    def __init__(self, spec: dict, root: Path):
        super().__init__(spec, root)
        # Answers then stand in the last column of every batch.
        self.tokenizer.padding_side = "left"
        self.prompt_end = self.tokenizer(spec["prompt_end"], add_special_tokens=False)["input_ids"]
        answers = [self.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in spec["answers"]]
        split = [text for text, ids in zip(spec["answers"], answers, strict=True) if len(ids) != 1]
        if split or len({ids[0] for ids in answers}) != len(answers):
            raise ValueError(f"Answers must be distinct single tokens of this tokenizer; change {split or answers}.")
        self.answers = [ids[0] for ids in answers]

    @property
    def num_classes(self) -> int:
        return len(self.answers)

    def load_model(self) -> torch.nn.Module:
        """The base model in float32 (on CPUs without bfloat16 units that is also the faster one)."""
        quantization = {"quantization_config": GgufConfig(dequantize=True)} if self.load_arguments else {}
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, **self.load_arguments, **quantization
        )

    def train_dataset(self) -> Dataset:
        """Columns input_ids (text, prompt, answer), length."""
        ids = [self.test_ids(row) + [self.answers[row["label"]]] for row in self.train_rows]
        return Dataset.from_dict({"input_ids": ids, "length": list(map(len, ids))})

    def collator(self, trainer: str):
        """Left-pads and supervises the last column.

        For the stock Trainer the batch also says that only the logits before the answer are needed
        (`logits_to_keep`, `shift_labels`): the same loss, without logits that nothing supervises.
        """

        def collate(rows: list[dict]) -> dict:
            batch = dict(self.tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt"))
            batch["labels"] = torch.full_like(batch["input_ids"], -100)
            batch["labels"][:, -1] = batch["input_ids"][:, -1]
            if trainer == "bp":
                nothing = torch.full_like(batch["labels"][:, -1:], -100)
                batch |= {"logits_to_keep": 2, "shift_labels": torch.cat([batch["labels"][:, -1:], nothing], dim=1)}
            return batch

        return collate

    def test_ids(self, row: dict) -> list[int]:
        return self.encode(row[self.spec["data"]["text"]]) + self.prompt_end

    def class_logits(self, model: torch.nn.Module, batch: dict) -> torch.Tensor:
        return model(**batch, logits_to_keep=1).logits[:, -1, self.answers]


def make_task(spec: dict, root: Path) -> Task:
    """The task of an experiment."""
    return {"classification": Classification, "answer_token": AnswerToken}[spec["kind"]](spec, root)
