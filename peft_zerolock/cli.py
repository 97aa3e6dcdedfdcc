"""The command `zerolock`: what training would take, and whether a model can be trained chunk by chunk.

zerolock plan smollm2-135m --target-modules q_proj v_proj --num-chunks 2 3 --devices gpu:8GiB
zerolock plan org/name --batch 4 --seq 2048 --devices gpu0:24GiB:1.0 gpu1:12GiB:0.5 --json
zerolock inspect minilm-l6 --task SEQ_CLS --num-chunks 3
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from peft import get_peft_model
from rich.console import Console
from transformers.utils import logging

from .blocks import find_blocks
from .config import ZeroLockConfig
from .planning import plan, read_config
from .planning.blank import MODEL_CLASSES
from .planning.measure import load_weights
from .planning.plan import DTYPES, SPLITS
from .planning.table import print_plan
from .planning.uses import OPTIMIZERS
from .staging import dissect

_LORA = ("r", "target_modules", "modules_to_save", "lora_dropout")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or 2 where something was given that cannot be used."""
    options = _parser().parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        options.run(options)
    except ValueError as error:
        print(f"zerolock {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(options: argparse.Namespace) -> None:
    names = "num_chunks batch seq supervised num_labels dtype optimizer devices split in_flight checkpointing measure"
    made = plan(options.model, _config(options), **{name: getattr(options, name) for name in names.split()})
    if options.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        print_plan(made, Console(width=None if sys.stdout.isatty() else 200))


def _inspect(options: argparse.Namespace) -> None:
    """Loads the model, runs the admission test, and prints what it found."""
    if options.num_chunks is not None and len(options.num_chunks) > 1:
        raise ValueError(f"num_chunks={options.num_chunks}: inspect tests one number of chunks; give one.")
    config = _config(options, num_chunks=options.num_chunks[0] if options.num_chunks else None)
    model_config = read_config(options.model)
    if options.num_labels is not None:
        model_config.num_labels = options.num_labels
    model = load_weights(options.model, model_config, options.task, DTYPES["float32"])
    kind, block = type(model).__name__, type(find_blocks(model)[0]).__name__
    adapted = get_peft_model(model, config)
    blocks, chunks, anatomy = dissect(adapted, config)
    sizes = {id(p): p.numel() for p in adapted.parameters() if p.requires_grad}
    learned = [sum(sizes[key] for key, owner in anatomy.owner.items() if owner == k) for k in range(len(chunks))]
    tail = {id(p) for p in anatomy.tail_parameters}
    found = {
        "model": options.model,
        "class": kind,
        "block": block,
        "blocks": len(blocks),
        "chunks": [[chunk.start, chunk.stop] for chunk in chunks],
        "trainable": learned,
        "tail": [name for name, p in adapted.named_parameters() if id(p) in tail],
        "admitted": True,
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{kind}: {len(blocks)} blocks of {block}. Admitted: chunk by chunk it gives its own outputs.")
    for k, (chunk, size) in enumerate(zip(chunks, learned, strict=True), start=1):
        print(f"  chunk {k}: blocks {chunk.start} to {chunk.stop - 1}, {size:,} trainable parameters")
    print(f"  tail: {', '.join(found['tail'])}")


def _config(options: argparse.Namespace, **more: Any) -> ZeroLockConfig:
    """The adapter and chunk settings; only what was given, so that defaults stay the config's own."""
    given = {name: getattr(options, name) for name in (*_LORA, *_chunk_fields()) if getattr(options, name) is not None}
    if given.get("target_modules") == ["all-linear"]:
        given["target_modules"] = "all-linear"
    return ZeroLockConfig(task_type=options.task, **given, **more)


def _chunk_fields() -> dict[str, str]:
    """ZeroLockConfig's own settings with their help, but for the number of chunks, of which several can be given."""
    names = ZeroLockConfig().chunk_settings().keys() - {"num_chunks"}
    return {f.name: str(f.metadata["help"]) for f in fields(ZeroLockConfig) if f.name in names}


def _value(text: str) -> Any:
    """A setting as it would stand in JSON; anything else is a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "zerolock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    planned = commands.add_parser("plan", help="memory, FLOPs and the largest batch, before any weight is loaded")
    planned.set_defaults(run=_plan)
    inspected = commands.add_parser("inspect", help="load the model and test whether it can be cut into chunks")
    inspected.set_defaults(run=_inspect)
    for command in (planned, inspected):
        _add_model_options(command)
    add = planned.add_argument
    add("--batch", type=int, default=8, help="rows of a micro-batch (default 8)")
    add("--seq", type=int, default=512, help="tokens of a row (default 512)")
    add("--supervised", type=int, help="tokens of a row that are targets (default: all but the first)")
    add("--dtype", default="bfloat16", help=f"of the frozen weights: {', '.join(DTYPES)} (default bfloat16)")
    add("--optimizer", default="adamw", help=f"{' or '.join(OPTIMIZERS)} (default adamw)")
    add("--devices", nargs="+", default=(), metavar="NAME:MEMORY[:SPEED]", help="such as gpu0:24GiB gpu1:12GiB:0.5")
    add("--split", default="even", help=f"how one device's chunks are split: {' or '.join(SPLITS)} (default even)")
    add("--in-flight", type=int, default=1, help="micro-batches under way between devices (default 1)")
    add("--checkpointing", action="store_true", help="activation checkpointing in the ZeroLock rows too")
    add("--measure", action="store_true", help="load the weights, run real steps, print predicted against measured")
    return parser


def _add_model_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", help="a Hub name (only its config is fetched to plan), a folder, a gguf or config.json file")
    add("--task", default="CAUSAL_LM", choices=list(MODEL_CLASSES), help="(default CAUSAL_LM)")
    add("--num-labels", type=int, help="classes of a classification head")
    add("--num-chunks", type=int, nargs="+", help="how many chunks; several are compared (default 2 3 4)")
    add("--r", type=int, help="LoRA's rank (default 8)")
    add("--target-modules", nargs="+", help="LoRA's targets, or all-linear (default: PEFT's for the model)")
    add("--modules-to-save", nargs="+", help="modules trained whole")
    add("--lora-dropout", type=float, help="(default 0)")
    add("--json", action="store_true", help="print JSON")
    for name, meaning in _chunk_fields().items():
        add(f"--{name.replace('_', '-')}", type=_value, help=meaning.replace("%", "%%"))


if __name__ == "__main__":
    sys.exit(main())
