"""The work that all methods do: SmolLM2-135M with LoRA on q and v, rows of one length, the last tokens supervised."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from peft_zerolock import ZeroLockConfig  # noqa: E402
from peft_zerolock.sources import resolve_model  # noqa: E402
from peft_zerolock.stage import Entry, Stage  # noqa: E402
from peft_zerolock.staging import build_stages  # noqa: E402


@dataclass
class Work:
    """Sizes: rows of a micro-batch, micro-batches of an update window, tokens of a row, supervised ones at its end.

    `readout` and `readout_rows` are ZeroLockConfig's; the first set is the paper's, "auto" twice are the defaults.
    """

    batch: int = 2
    micro_batches: int = 4
    length: int = 128
    supervised: int = 16
    readout: str = "lm_head"
    readout_rows: str = "1.0"

    @property
    def tokens(self) -> int:
        """Tokens of an update window."""
        return self.batch * self.micro_batches * self.length

    def rows(self, seed: int) -> dict[str, Tensor]:
        """The rows of an update window, `(batch * micro_batches, length)`."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(10, 40000, (self.batch * self.micro_batches, self.length), generator=generator)
        labels = ids.clone()
        labels[:, : -self.supervised] = -100
        return {"input_ids": ids, "labels": labels}

    def entries(self, seed: int) -> list[Entry]:
        """The same as micro-batches."""
        parts = {name: value.split(self.batch) for name, value in self.rows(seed).items()}
        count = self.batch * self.micro_batches * self.supervised
        return [
            Entry({name: value[i] for name, value in parts.items()}, count, first_row=seed + i * self.batch)
            for i in range(self.micro_batches)
        ]


def load_stages(work: Work, num_chunks: int) -> tuple[Any, list[Stage]]:
    """The base model in float32, with LoRA, and its stages; one chunk is backpropagation."""
    logging.disable_progress_bar()
    source = resolve_model("smollm2-135m")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(source.path, **source.model_kwargs(), dtype=torch.float32)
    config = ZeroLockConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        num_chunks=num_chunks,
        readout=work.readout if num_chunks > 1 else "lm_head",
        readout_rows="auto" if work.readout_rows == "auto" else float(work.readout_rows),
    )
    model = get_peft_model(base, config)
    model.train()
    return base, build_stages(model, config, sliced=True)


def learning(stages: list[Stage]) -> list[dict[str, Any]]:
    """The stages' parameters as groups of an optimizer, one a chunk."""
    return [{"params": [*s.adapters.values(), *s.readout.values()], "chunk": s.name} for s in stages]
