"""Short training runs on tiny models, ours and the stock Trainer's, for tests that compare them."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from zoo import class_rows, collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer


def arguments(output_dir: Any, **overrides: Any) -> TrainingArguments:
    """Four steps of two rows on the CPU, nothing saved or reported."""
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(output_dir), **(defaults | overrides))


def make_trainer(
    output_dir: Any,
    name: str = "llama",
    task: str = "CAUSAL_LM",
    *,
    stock: bool = False,
    lora: dict[str, Any] | None = None,
    chunks: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: Any = None,
    dtype: torch.dtype = torch.float32,
    trainer_class: Any = None,
    trainer: dict[str, Any] | None = None,
    **args: Any,
) -> Trainer:
    """A trainer on a tiny model; the adapter's start depends on nothing but the settings of LoRA."""
    base = make_model(name, task, **(model or {})).to(dtype)
    torch.manual_seed(1)
    settings = lora_arguments(name, task, **(lora or {}))
    config = LoraConfig(**settings) if stock else ZeroLockConfig(**settings, **(chunks or {}))
    data = data or (token_rows(24) if task == "CAUSAL_LM" else class_rows(24))
    return (trainer_class or (Trainer if stock else ZeroLockTrainer))(
        model=get_peft_model(base, config),
        args=arguments(output_dir, **args),
        train_dataset=data,
        data_collator=collate,
        **(trainer or {}),
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The adapter's weights."""
    return {
        n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" in n or "modules_to_save" in n
    }


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Over all weights, by name."""
    assert one.keys() == other.keys()
    return max((one[n] - other[n]).abs().max().item() for n in one)


def window_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients with which the first optimizer step is taken, before clipping."""
    found: dict[str, torch.Tensor] = {}
    clip = trainer._clip_grad_norm

    def record(model):
        if not found:
            found.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            stages = getattr(trainer, "_stages", [])
            readouts = {f"{s.name}.{n}": p for s in stages for n, p in s.readout.items() if p.grad is not None}
            found.update({n: p.grad.clone() for n, p in readouts.items()})
        return clip(model)

    trainer._clip_grad_norm = record
    trainer.train()
    return found
