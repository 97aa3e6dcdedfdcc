"""Runs one row of the quality comparison and writes its result, failed rows included.

    python eval/quality/run.py --experiment cola --method bp --learning-rate 1e-3 --seed 0
    python eval/quality/run.py --experiment cola --method bp --learning-rate 1e-3 --seed 100 --tune   # held-out rows

Every method of an experiment gets the same rows, batches, initial weights, LoRA settings and schedule.
"""

import argparse
import copy
import dataclasses
import hashlib
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import torch
from answers import make_task
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rows import Row, task_loss, write_result
from specs import DATA, EXPERIMENTS, RESULTS, ROOT, load_suite
from tasks import Task
from transformers import Trainer, TrainingArguments, set_seed

sys.path.append(str(ROOT / "eval"))
from memory import SavedActivations  # noqa: E402

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "numpy", "gguf")
EXIT_ROWS = 400
"""How many test rows each chunk's readout is scored on, at the most."""


def run_row(spec: dict, row: Row, data_root: Path) -> dict:
    """Trains and scores one row; returns the measured part of its result.

    Raises:
        ValueError: if the data, the model or the experiment's settings do not fit together, or training diverged.
    """
    method = spec["method"]
    task = make_task(spec, data_root, row.tuning)
    set_seed(row.seed)
    base = task.load_model()
    config = _peft_config(task, method)
    set_seed(row.seed)
    model = get_peft_model(base, config)
    dataset = task.train_dataset()
    with tempfile.TemporaryDirectory() as folder:
        build = partial(_make_trainer, task, row, folder)
        activations = {} if row.tuning else _activations(build, method["trainer"], model, dataset)
        trainer = build(method["trainer"], model, dataset)
        start, cpu_start = time.perf_counter(), time.process_time()
        output = trainer.train()
        train_seconds, train_cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    start = time.perf_counter()
    scores = task.score(trainer.model)
    if not math.isfinite(task_loss(scores)):
        raise ValueError(f"Training diverged at learning rate {row.learning_rate:g}: the loss is no finite number.")
    return {
        **scores,
        **activations,
        "exits": _exits(task, trainer) if row.seed == 0 and method["trainer"] == "zerolock" else [],
        "score_seconds": time.perf_counter() - start,
        "train_seconds": train_seconds,
        "train_cpu_seconds": train_cpu_seconds,
        "train_steps": output.global_step,
        "train_tokens": sum(dataset["length"]) * spec["training"]["num_train_epochs"],
        "test_size": len(task.test_rows),
        "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "hashes": task.hashes(),
        "zerolock_settings": _own_settings(config),
        "log": [_losses(entry) for entry in trainer.state.log_history if "loss" in entry],
    }


def _make_trainer(task: Task, row: Row, folder: str, kind: str, model: torch.nn.Module, dataset: Dataset, **extra):
    arguments = TrainingArguments(
        output_dir=folder,
        seed=row.seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,  # the task's collator chooses
        learning_rate=row.learning_rate,
        **{**task.spec["training"], **extra},
    )
    own = {"model": model, "args": arguments, "train_dataset": dataset, "data_collator": task.collator(kind)}
    return _trainer_class(kind)(**own)


def _peft_config(task: Task, method: dict) -> LoraConfig:
    # A copy: PEFT appends to modules_to_save, and the settings are recorded as they stand in the YAML file.
    arguments = copy.deepcopy({"task_type": task.task_type, **task.spec["lora"], **method.get("lora", {})})
    if method["trainer"] == "bp":
        return LoraConfig(**arguments)
    from peft_zerolock import ZeroLockConfig

    return ZeroLockConfig(**arguments, **method["zerolock"])


def _trainer_class(kind: str) -> type[Trainer]:
    if kind == "bp":
        return Trainer
    from peft_zerolock import ZeroLockTrainer

    return ZeroLockTrainer


def _activations(build, kind: str, model: torch.nn.Module, dataset: Dataset) -> dict[str, int]:
    """Bytes held for a backward pass at the peak of one step on the longest rows, by the method and by BP.

    Both take their step on a copy of the model.
    """
    lengths = dataset["length"]
    by_length = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    bytes_held = {}
    for name in {kind, "bp"}:
        step = build(name, copy.deepcopy(model), dataset, max_steps=1)
        step.train_dataset = dataset.select(by_length[: step.args.train_batch_size])
        with SavedActivations(step.model.parameters()) as saved:
            step.train()
        bytes_held[name] = saved.peak
    return {"activation_bytes": bytes_held[kind], "bp_activation_bytes": bytes_held["bp"]}


def _exits(task: Task, trainer: Trainer) -> list[dict]:
    """What each chunk would answer if the model stopped there, over the first test rows; the last one is the model.

    For the first seed alone: on a deep model it takes longer than the training.
    """
    from peft_zerolock.early_exit import EarlyExit

    stages = trainer.stages
    rows = task.test_rows[:EXIT_ROWS]
    found = []
    for k, stage in enumerate(stages, start=1):
        if not stage.learns:
            continue
        model = trainer.model if k == len(stages) else EarlyExit(trainer.model, stages[:k])
        measured = task.measure(task.outputs(model, EXIT_ROWS), rows)
        found.append({"chunk": k, "depth": stage.chunk.stop / stages[-1].chunk.stop, "rows": len(rows), **measured})
    return found


def _own_settings(config: LoraConfig) -> dict:
    """What a ZeroLockConfig adds to a LoraConfig, defaults filled in."""
    plain = {field.name for field in dataclasses.fields(LoraConfig)}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in plain}


def _losses(entry: dict) -> dict:
    return {
        key: value for key, value in entry.items() if key == "step" or key.split("/")[0] in ("loss", "consistency")
    }


def describe_run(threads: int) -> dict:
    """Commit, code, versions and machine: what a reader needs to run the row again."""
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "package_sha256": package_fingerprint(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "threads": threads},
    }


def package_fingerprint() -> str:
    """SHA-256 over the sources of peft_zerolock as they lie in the checkout, committed or not."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "peft_zerolock").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    """Runs one row from the command line; returns 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tune", action="store_true", help="score on held-out training rows, not on the test rows")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets (default ../shared/data)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, help="the YAML file")
    arguments = parser.parse_args()
    try:
        spec = load_suite(arguments.experiments).settings(arguments.experiment, arguments.method)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(arguments.threads)
    row = Row(arguments.experiment, arguments.method, arguments.seed, arguments.learning_rate, arguments.tune)
    result = {**dataclasses.asdict(row), "family": spec["family"], "config": spec, **describe_run(arguments.threads)}
    start = time.perf_counter()
    try:
        result |= {"status": "ok", **run_row(spec, row, arguments.data)}
    except Exception as error:  # a row that failed is a result, with its traceback
        traceback.print_exc()
        result |= {"status": "failed", "error": repr(error), "traceback": traceback.format_exc()}
    result["wall_seconds"] = time.perf_counter() - start
    write_result(row.result_file(arguments.out), result)
    shown = ("status", "accuracy", "pearson", "nll", "mse", "train_cpu_seconds", "wall_seconds")
    print({key: result[key] for key in shown if key in result}, flush=True)
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
