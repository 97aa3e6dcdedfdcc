"""Tasks in which a causal LM answers a prompt; the loss is on the answer's tokens alone."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tasks import Classification, Labelled, Regression, Task, compact
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GgufConfig


class Answers(Task):
    """A text, a prompt and an answer; batches are padded on the left, so answers end in the last column."""

    task_type = "CAUSAL_LM"

    def __init__(self, spec: dict, root: Path, tuning: bool = False):
        super().__init__(spec, root, tuning)
        self.tokenizer.padding_side = "left"
        self.prompt_end = self.tokenizer(spec["prompt_end"], add_special_tokens=False)["input_ids"]

    def load_model(self) -> torch.nn.Module:
        """The base model in float32 (on CPUs without bfloat16 units that is also the faster one)."""
        quantization = {"quantization_config": GgufConfig(dequantize=True)} if self.load_arguments else {}
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, **self.load_arguments, **quantization
        )

    def train_dataset(self) -> Dataset:
        """Columns input_ids (prompt, answer), answer (its tokens), length."""
        prompts, answers = [], []
        for row in self.train_rows:
            prompts.append(self.prompt_ids(row))
            answers.append(self.answer_ids(row))
        ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return Dataset.from_dict({"input_ids": ids, "answer": list(map(len, answers)), "length": list(map(len, ids))})

    def collator(self, trainer: str) -> Any:
        """Supervises the answers.

        For the stock Trainer the batch also says that only the logits before the answers are needed
        (`logits_to_keep`, `shift_labels`): the same loss, without logits that nothing supervises.
        """

        def collate(rows: list[dict]) -> dict:
            batch = dict(self.tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt"))
            batch["labels"] = torch.full_like(batch["input_ids"], -100)
            for index, row in enumerate(rows):
                batch["labels"][index, -row["answer"] :] = batch["input_ids"][index, -row["answer"] :]
            if trainer == "bp":
                longest = max(row["answer"] for row in rows)
                nothing = torch.full_like(batch["labels"][:, -1:], -100)
                shifted = torch.cat([batch["labels"][:, -longest:], nothing], dim=1)
                batch |= {"logits_to_keep": longest + 1, "shift_labels": shifted}
            return batch

        return collate

    def prompt_ids(self, row: dict) -> list[int]:
        """The text, cut to `max_tokens`, and what follows it."""
        text = self.tokenizer("\n".join(self.texts(row)), truncation=True, max_length=self.spec["max_tokens"])
        return text["input_ids"] + self.prompt_end

    @abstractmethod
    def answer_ids(self, row: dict) -> list[int]:
        """The tokens that are supervised."""


class AnswerToken(Labelled, Answers):
    """The answer is one token, which names the class; it is chosen among the classes' tokens."""

    def __init__(self, spec: dict, root: Path, tuning: bool = False):
        super().__init__(spec, root, tuning)
        answers = [self.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in spec["answers"]]
        split = [text for text, ids in zip(spec["answers"], answers, strict=True) if len(ids) != 1]
        if split or len({ids[0] for ids in answers}) != len(answers):
            raise ValueError(f"Answers must be distinct single tokens of this tokenizer; change {split or answers}.")
        self.answers = [ids[0] for ids in answers]

    def answer_ids(self, row: dict) -> list[int]:
        return [self.answers[row["label"]]]

    def test_ids(self, row: dict) -> list[int]:
        return self.prompt_ids(row)

    def read(self, model: torch.nn.Module, batch: dict, rows: list[dict]) -> torch.Tensor:
        return model(**batch, logits_to_keep=1).logits[:, -1, self.answers]


class AnswerLoss(Answers):
    """The answer is a text and the end of the sequence; what counts is its loss, per token of the answer.

    Prompt and answer have `max_tokens` together: prompts are cut to half of it, answers to the rest.
    """

    score_batch = 4

    def prompt_ids(self, row: dict) -> list[int]:
        text = self.tokenizer("\n".join(self.texts(row)))["input_ids"]
        return text[: self.spec["max_tokens"] // 2 - len(self.prompt_end)] + self.prompt_end

    def answer_ids(self, row: dict) -> list[int]:
        ids = self.tokenizer(row[self.spec["data"]["answer"]], add_special_tokens=False)["input_ids"]
        room = self.spec["max_tokens"] - len(self.prompt_ids(row))
        return [*ids, self.tokenizer.eos_token_id][:room]

    def test_ids(self, row: dict) -> list[int]:
        return self.prompt_ids(row) + self.answer_ids(row)

    def read(self, model: torch.nn.Module, batch: dict, rows: list[dict]) -> torch.Tensor:
        """Each row's sum of losses and its number of answer tokens, `(rows, 2)`."""
        lengths = [len(self.answer_ids(row)) for row in rows]
        longest = max(lengths)
        # One column more than the answers have: each token is predicted one column before its own.
        logits = model(**batch, logits_to_keep=longest + 1).logits[:, -longest - 1 : -1].float()
        losses = cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, -longest:], reduction="none")
        sums = torch.stack([loss[-length:].sum() for loss, length in zip(losses, lengths, strict=True)])
        return torch.stack([sums, torch.tensor(lengths, dtype=sums.dtype)], dim=1)

    def row_losses(self, outputs: torch.Tensor, rows: list[dict]) -> torch.Tensor:
        return outputs[:, 0] / outputs[:, 1]

    def measure(self, outputs: torch.Tensor, rows: list[dict]) -> dict[str, float]:
        """Mean NLL (nats) per answer token."""
        return {"nll": (outputs[:, 0].sum() / outputs[:, 1].sum()).item()}

    def details(self, outputs: torch.Tensor, rows: list[dict]) -> dict:
        """One loss and one number of tokens a row."""
        return {**super().details(outputs, rows), "row_tokens": compact(outputs[:, 1], 0)}


def make_task(spec: dict, root: Path, tuning: bool = False) -> Task:
    """The task of a row."""
    kinds: dict[str, type[Task]] = {
        "classification": Classification,
        "regression": Regression,
        "answer_token": AnswerToken,
        "answer_loss": AnswerLoss,
    }
    return kinds[spec["kind"]](spec, root, tuning)
