"""Runs one row of the quality comparison and writes its result, failed rows included.

    python eval/quality/run.py --experiment sst2_minilm --method bp --seed 0

Every method of an experiment gets the same rows, batches, initial weights, LoRA settings and schedule.
"""

import argparse
import copy
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from specs import DATA, EXPERIMENTS, RESULTS, ROOT, Row, load_experiments, write_result
from tasks import Task, make_task
from transformers import Trainer, TrainingArguments, set_seed

PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "numpy", "gguf")


def run_row(spec: dict, row: Row, data_root: Path) -> dict:
    """Trains and scores one row; returns the measured part of its result.

    Raises:
        ValueError: if the data, the model or the experiment's settings do not fit together.
    """
    method = spec["methods"][row.method]
    task = make_task(spec, data_root)
    set_seed(row.seed)
    base = task.load_model()
    config = _peft_config(task, method)
    set_seed(row.seed)
    model = get_peft_model(base, config)
    dataset = task.train_dataset()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            seed=row.seed,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,  # the task's collator chooses
            **spec["training"],
        )
        trainer = _trainer_class(method)(
            model=model, args=arguments, train_dataset=dataset, data_collator=task.collator(method["trainer"])
        )
        start, cpu_start = time.perf_counter(), time.process_time()
        output = trainer.train()
        train_seconds, train_cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    start = time.perf_counter()
    scores = task.score(trainer.model)
    return {
        **scores,
        "score_seconds": time.perf_counter() - start,
        "train_seconds": train_seconds,
        "train_cpu_seconds": train_cpu_seconds,
        "train_steps": output.global_step,
        "train_tokens": sum(dataset["length"]) * spec["training"]["num_train_epochs"],
        "test_size": len(task.labels),
        "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "hashes": task.hashes(),
        "zerolock_settings": _own_settings(config),
        "log": [_losses(entry) for entry in trainer.state.log_history if "loss" in entry],
    }


def _peft_config(task: Task, method: dict) -> LoraConfig:
    # A copy: PEFT appends to modules_to_save, and the settings are recorded as they stand in the YAML file.
    arguments = copy.deepcopy({"task_type": task.task_type, **task.spec["lora"], **method.get("lora", {})})
    if method["trainer"] == "bp":
        return LoraConfig(**arguments)
    from peft_zerolock import ZeroLockConfig

    return ZeroLockConfig(**arguments, **method["zerolock"])


def _trainer_class(method: dict) -> type[Trainer]:
    if method["trainer"] == "bp":
        return Trainer
    from peft_zerolock import ZeroLockTrainer

    return ZeroLockTrainer


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets (default ../shared/data)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, help="the YAML file")
    arguments = parser.parse_args()
    experiments, _ = load_experiments(arguments.experiments)
    spec = experiments.get(arguments.experiment)
    if spec is None or arguments.method not in spec["methods"]:
        known = {name: sorted(entry["methods"]) for name, entry in experiments.items()}
        parser.error(f"no row {arguments.experiment} / {arguments.method}; there are {known}")
    torch.set_num_threads(arguments.threads)
    row = Row(arguments.experiment, arguments.method, arguments.seed)
    result = {**dataclasses.asdict(row), "config": row_config(spec, row), **describe_run(arguments.threads)}
    start = time.perf_counter()
    try:
        result |= {"status": "ok", **run_row(spec, row, arguments.data)}
    except Exception as error:  # a row that failed is a result, with its traceback
        traceback.print_exc()
        result |= {"status": "failed", "error": repr(error), "traceback": traceback.format_exc()}
    result["wall_seconds"] = time.perf_counter() - start
    write_result(row.result_file(arguments.out), result)
    print({key: result[key] for key in ("status", "accuracy", "nll", "wall_seconds") if key in result})
    return 0 if result["status"] == "ok" else 1


def row_config(spec: dict, row: Row) -> dict:
    """The experiment's settings with this row's method only."""
    return {key: value for key, value in spec.items() if key != "methods"} | {"method": spec["methods"][row.method]}


if __name__ == "__main__":
    sys.exit(main())
