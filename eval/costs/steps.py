"""One training step of each method, as the stock Trainer and ZeroLockTrainer run it, on a batch that is given."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from counting import ADAPTERS, BASE, BOUNDARY, OPTIMIZER, READOUTS, MemoryCounter
from peft import get_peft_model
from torch import Tensor, nn

from peft_zerolock import ZeroLockConfig
from peft_zerolock.runtime import SequentialRuntime
from peft_zerolock.stage import Entry, Stage, learning_rows
from peft_zerolock.staging import build_stages

TRAINERS = ("bp", "zerolock")


class Setup:
    """A model with adapters, its stages where it is trained chunk by chunk, and its optimizer (AdamW, as in Trainer).

    Args:
        make_base: builds the base model.
        lora: LoraConfig's arguments, task_type included.
        method: `trainer` ("bp": the model's own loss and one backward pass; "zerolock": the stages), and where wanted
            `checkpointing` (of each block), `micro_batches` (BP: into how many the batch is split, their gradients
            added up), `zerolock` (ZeroLockConfig's own arguments).
        make: called with the function that builds model and adapters; `ShapesOnly.model` for one without weights.

    Raises:
        ValueError: an unknown trainer, or settings that do not fit the model.
    """

    def __init__(
        self,
        make_base: Callable[[], nn.Module],
        lora: dict[str, Any],
        method: dict[str, Any],
        make: Callable[[Callable[[], nn.Module]], nn.Module] = lambda build: build(),
    ):
        if method.get("trainer") not in TRAINERS:
            raise ValueError(f"trainer={method.get('trainer')!r} is not known: it must be one of {TRAINERS}.")
        config = ZeroLockConfig(**lora, **method.get("zerolock", {}))
        self.micro_batches = method.get("micro_batches", 1)
        self.model: Any = make(partial(_with_adapters, make_base, config))
        self.model.get_base_model().config.use_cache = False
        if method.get("checkpointing"):
            self.model.get_base_model().activation_checkpointing_enable()
        self.is_causal = config.task_type == "CAUSAL_LM"
        sliced = self.is_causal and config.logits_slice is not None
        self.stages = build_stages(self.model, config, sliced) if method["trainer"] == "zerolock" else []
        self.model.train()
        self.frozen = [p for p in self.model.parameters() if not p.requires_grad]
        self.adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.readouts = [p for stage in self.stages for p in stage.readout.values()]
        self.copies = [p for stage in self.stages for p in stage.copies.values()]
        self.optimizer = torch.optim.AdamW(self.adapters + self.readouts, lr=1e-4, fused=True)
        self._window = 0

    def step(self, batch: dict[str, Tensor]) -> None:
        """Forward, backward and update; an update window of one micro-batch."""
        if self.stages:
            entry = Entry(batch, self._count(batch), first_row=self._window)
            self._window += 1
            SequentialRuntime(self.stages, torch.Tensor.backward).submit(entry, self._own_loss)
        else:
            counted = {"num_items_in_batch": self._count(batch)} if self.is_causal else {}
            rows = len(batch["input_ids"])
            size = -(-rows // self.micro_batches)
            for first in range(0, rows, size):
                part = {name: value[first : first + size] for name, value in batch.items()}
                loss = self.model(**part, **counted).loss
                (loss if self.is_causal else loss * len(part["input_ids"]) / rows).backward()
                del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _count(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"][..., 1:] if self.is_causal else batch["labels"]).ne(-100).sum()

    def _own_loss(self, view: nn.Module, inputs: dict[str, Any], with_outputs: bool, share: float) -> Any:
        counted = {"num_items_in_batch": self._count(inputs) * share} if self.is_causal else {}
        outputs = view(**inputs, **counted)
        return outputs.loss, outputs

    def count(self, batch: dict[str, Tensor], vocab: int | None = None) -> MemoryCounter:
        """Counts the bytes of one step, update included, with the optimizer's state already there.

        Where chunks learn from a share of the rows, it is a window in which a chunk learns from most of them.

        Args:
            vocab: size of the vocabulary, for the category `logits`.
        """
        learning = self.adapters + self.readouts
        if not self.optimizer.state:
            for parameter in learning:
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._window = self._heaviest_window(batch)
        counter = MemoryCounter(vocab)
        counter.add_parameters(self.frozen, BASE)
        counter.mark(self.model.buffers(), BASE)
        counter.add_parameters(self.adapters, ADAPTERS)
        counter.add_parameters(self.readouts + self.copies, READOUTS)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        counter.mark([value for value in states if isinstance(value, Tensor)], OPTIMIZER)
        for stage in self.stages:
            stage.step = partial(_marking_step, stage.step, counter)  # type: ignore[method-assign]
        try:
            with counter:
                self.step(batch)
        finally:
            for stage in self.stages:
                del stage.step
        return counter

    def _heaviest_window(self, batch: dict[str, Tensor]) -> int:
        def weight(window: int) -> int:
            entry = Entry(batch, 1.0, first_row=window)
            depths = [(len(learning_rows(entry, s.row_share)), len(s.chunk) + self._reach(s)) for s in self.stages]
            return max(rows * blocks for rows, blocks in depths)

        return max(range(64), key=weight) if self.stages else 0

    def _reach(self, stage: Stage) -> int:
        later = self.stages[-1].chunk.stop - stage.chunk.stop
        return stage.config.reach(later) if stage.config.resolved_readout == "blocks" else 0


def _with_adapters(make_base: Callable[[], nn.Module], config: ZeroLockConfig) -> nn.Module:
    return get_peft_model(make_base(), config)


def _marking_step(step: Callable, counter: MemoryCounter, entry: Entry, send: Callable | None, loss_of: Any) -> Any:
    """A stage's step whose hidden state is counted as a boundary state from when it is handed on."""

    def marking_send(hidden: Tensor) -> None:
        counter.mark([hidden], BOUNDARY)
        send(hidden)

    return step(entry, None if send is None else marking_send, loss_of)
