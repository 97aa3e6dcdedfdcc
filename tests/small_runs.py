"""Short ZeroLock training runs on the tiny models of `zoo`, and what the tests of saving and resuming compare."""

import json
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import Tensor, nn

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, ZeroLockTrainingArguments

ROWS = {"CAUSAL_LM": zoo.token_rows, "SEQ_CLS": zoo.class_rows}


def make_arguments(folder: Path | str, **overrides: Any) -> ZeroLockTrainingArguments:
    """Three steps of two rows on the CPU at a rate at which every weight moves; nothing saved."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return ZeroLockTrainingArguments(**(values | overrides))


def make_trainer(
    folder: Path | str,
    name: str = "llama",
    task: str = "CAUSAL_LM",
    config: dict[str, Any] | None = None,
    model: nn.Module | dict[str, Any] | None = None,
    rows: int = 16,
    **arguments: Any,
) -> ZeroLockTrainer:
    """A trainer of a zoo model in two chunks.

    Args:
        config: ZeroLockConfig arguments beyond `zoo.lora_arguments`.
        model: a model, or overrides of the zoo model's configuration.
        arguments: as in `make_arguments`.
    """
    settings = zoo.lora_arguments(name, task, **({"num_chunks": 2} | (config or {})))
    if not isinstance(model, nn.Module):
        model = zoo.make_model(name, task, **(model or {}))
    torch.manual_seed(1)
    return ZeroLockTrainer(
        model=model,
        args=make_arguments(folder, **arguments),
        peft_config=ZeroLockConfig(**settings),
        train_dataset=ROWS[task](rows),
        eval_dataset=ROWS[task](8, seed=5),
        data_collator=zoo.collate,
    )


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """Names of the parameters and buffers that differ from `before`, by bytes."""
    now = model.state_dict()
    assert now.keys() == before.keys()
    return {name for name, tensor in now.items() if not torch.equal(tensor, before[name])}


def losses(trainer: ZeroLockTrainer) -> list[dict[str, float]]:
    """Every logged training loss, per chunk too, a dictionary per log."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: value for key, value in entry.items() if "loss" in key} for entry in logs]


def read_json(path: Path | str) -> Any:
    """The content of a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))
