"""One row's training step on one model, real or without weights, for counting."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..admission import quiet_model
from ..blocks import base_model_of, find_blocks
from ..config import CLASSIFICATION_TASKS, ZeroLockConfig
from ..readout import DEFAULT_VOCAB
from ..runtime import SequentialRuntime
from ..stage import Entry, Stage, learning_rows
from ..staging import build_stages
from .blank import Blank
from .count import StepCount, StepCounter, unique_bytes

_STARTS = 60
"""Places in a window that are looked at: shares of halves to sixths repeat within them."""


@dataclass(frozen=True)
class Batch:
    """The shape of a micro-batch.

    Attributes:
        rows, seq: `(batch, seq)`.
        supervised: positions of a row that are targets (causal LMs), at most seq - 1.
    """

    rows: int
    seq: int
    supervised: int

    def inputs(self, model: PeftModel, config: ZeroLockConfig) -> dict[str, Tensor]:
        """Such a micro-batch, with a padded row: attention needs a mask. Its values matter to nothing counted."""
        ids = torch.ones(self.rows, self.seq, dtype=torch.long, device=base_model_of(model).device)
        mask = torch.ones_like(ids)
        mask[-1, -1] = 0
        labels = self._labels(ids, base_model_of(model).config, config)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _labels(self, ids: Tensor, model_config: Any, config: ZeroLockConfig) -> Tensor:
        if config.task_type == "SEQ_CLS":
            kind, classes = model_config.problem_type, model_config.num_labels
            if kind == "multi_label_classification":
                return torch.zeros(self.rows, classes, device=ids.device)
            is_value = kind == "regression" or (kind is None and classes == 1)
            return torch.zeros(self.rows, dtype=torch.float32 if is_value else torch.long, device=ids.device)
        labels = ids.clone()
        if config.task_type == "TOKEN_CLS":
            labels.zero_()
        else:
            labels[:, : self.seq - self.supervised] = -100
        return labels


@dataclass
class BlockCost:
    """What one block of a model takes: frozen and trained weights and kept activations in bytes, forward FLOPs."""

    weights: int
    trained: int
    kept: int
    flops: int


class Trial:
    """A model set up for a row's training step.

    Args:
        model: with adapters in place; a Blank model needs its mode in `mode`.
        config: the chunk settings.
        local: train chunk by chunk; otherwise by backpropagation with the model's own loss, as Trainer does.
        checkpointing: switch activation checkpointing on.

    Attributes:
        adapters: what is trained and saved: LoRA and modules_to_save.
        stages: empty for backpropagation.

    Raises:
        ValueError: the settings do not fit the model.
    """

    def __init__(
        self, model: PeftModel, config: ZeroLockConfig, local: bool, checkpointing: bool, mode: Blank | None = None
    ):
        self.model, self.config, self.mode = model, config, mode
        self.stages: list[Stage] = []
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        if checkpointing:
            base_model_of(model).activation_checkpointing_enable()
        with self._place():
            if local:
                with mode.trusting() if mode is not None else nullcontext():
                    vocab = self._vocabulary()
                    sliced = config.logits_slice is not None and _shifts_labels(model)
                    self.stages = build_stages(model, config, sliced, vocab=vocab)
                if mode is not None:
                    mode.distinct = None if vocab is None else len(vocab)
            for parameter in self.learned():
                parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def _place(self) -> Iterator[None]:
        with warnings.catch_warnings(), nullcontext() if self.mode is None else self.mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield

    def _vocabulary(self) -> Tensor | None:
        if self.config.resolved_readout != "vocab":
            return None
        asked, size = self.config.readout_vocab, base_model_of(self.model).config.get_text_config().vocab_size
        number = len(asked) if isinstance(asked, list) else min(asked or DEFAULT_VOCAB, size)
        return torch.arange(number, device=base_model_of(self.model).device)

    def learned(self) -> list[nn.Parameter]:
        """What has a gradient and optimizer state."""
        if not self.stages:
            return self.adapters
        return [p for stage in self.stages for p in (*stage.adapters.values(), *stage.readout.values())]

    def tensors(self) -> list[Tensor]:
        """Every weight and buffer, the readouts' own included."""
        own = [p for stage in self.stages for p in (*stage.readout.values(), *stage.copies.values())]
        return [*self.model.parameters(), *self.model.buffers(), *own]

    def places(self, batch: Batch) -> list[Entry]:
        """The micro-batch at few places in an update window, at which each chunk learns from every number of rows
        that it ever learns from (`readout_rows`)."""
        with self._place():
            start = Entry(batch.inputs(self.model, self.config), float(batch.rows * batch.supervised))
        entries = [replace(start, first_row=row) for row in range(_STARTS)]
        missing = {(k, rows) for entry in entries for k, rows in enumerate(self._rows(entry))}
        chosen: list[Entry] = []
        while missing or not chosen:
            best = max(entries, key=lambda entry: len(missing & set(enumerate(self._rows(entry)))))
            missing -= set(enumerate(self._rows(best)))
            chosen.append(best)
        return chosen

    def _rows(self, entry: Entry) -> list[int]:
        """How many rows each stage learns from."""
        shares = [stage.row_share if stage.learns and not stage.is_last else 1.0 for stage in self.stages] or [1.0]
        return [len(learning_rows(entry, share)) for share in shares]

    def run(self, entry: Entry, finished: Callable[[Any], None] = lambda stage: None) -> None:
        """One micro-batch: forward and backward; gradients are added to those that are there."""
        if self.stages:
            SequentialRuntime(self.stages, Tensor.backward, finished).submit(entry, self._own_loss)
        else:
            self._own_loss(self.model, entry.inputs, False, 1.0)[0].backward()
            finished(None)

    def _own_loss(
        self, model: nn.Module, inputs: dict[str, Any], with_outputs: bool, row_share: float
    ) -> tuple[Tensor, Any]:
        classifies = self.config.task_type in CLASSIFICATION_TASKS
        counted = {} if classifies else {"num_items_in_batch": row_share * inputs["labels"].numel()}
        outputs = model(**inputs, **counted)
        return outputs.loss, outputs

    def count(self, batch: Batch) -> list[StepCount]:
        """What each stage of a step takes (backpropagation has one), by counting its operations.

        The peak is that of the heaviest place in an update window, the FLOPs are the mean over all places.
        """
        vocab = None
        if self.config.task_type == "CAUSAL_LM":
            vocab = base_model_of(self.model).config.get_text_config().vocab_size
        if self.mode is not None:
            self.mode.chosen = batch.supervised / batch.seq if self.config.task_type == "CAUSAL_LM" else 1.0
        places = self.places(batch)
        found: list[dict[int, StepCount]] = [{} for _ in self._rows(places[0])]
        for entry in places:
            counts: list[StepCount] = []
            with self._place(), StepCounter(self.tensors(), vocab) as counter:
                self.run(entry, _taking(counter, counts))
            for by_rows, rows, count in zip(found, self._rows(entry), counts, strict=True):
                by_rows[rows] = count
        often = zip(*(self._rows(replace(places[0], first_row=row)) for row in range(_STARTS)), strict=True)
        heaviest = []
        for by_rows, all_rows in zip(found, often, strict=True):
            count = max(by_rows.values(), key=lambda c: c.peak)
            flops = sum(by_rows[rows].flops for rows in all_rows) // _STARTS
            heaviest.append(replace(count, flops=flops))
        return heaviest

    def block_costs(self, batch: Batch) -> tuple[list[BlockCost], int]:
        """What each block takes in a forward pass that keeps its activations, and the FLOPs of all of it."""
        blocks = find_blocks(self.model)
        marks: list[list[tuple[int, int]]] = [[] for _ in blocks]
        inputs = self.places(batch)[0].inputs
        with self._place(), StepCounter(self.tensors()) as counter:

            def note(i: int) -> Any:
                return lambda *_: marks[i].append((counter.bytes, counter.count.flops))

            hooks = [b.register_forward_pre_hook(note(i)) for i, b in enumerate(blocks)]
            hooks += [b.register_forward_hook(note(i)) for i, b in enumerate(blocks)]
            try:
                with quiet_model(self.model):
                    self._own_loss(self.model, inputs, False, 1.0)
            finally:
                for hook in hooks:
                    hook.remove()
        costs = []
        for block, (before, after) in zip(blocks, marks, strict=True):
            parameters = list(block.parameters())
            trained = unique_bytes(p for p in parameters if p.requires_grad)
            weights = unique_bytes(p for p in parameters if not p.requires_grad)
            costs.append(BlockCost(weights, trained, after[0] - before[0], after[1] - before[1]))
        return costs, counter.count.flops


def _taking(counter: StepCounter, counts: list[StepCount]) -> Callable[[Any], None]:
    return lambda stage: counts.append(counter.take())


def _shifts_labels(model: PeftModel) -> bool:
    """Whether the model's own loss is that of causal LMs, by transformers' table; as Trainer finds it out."""
    return LOSS_MAPPING.get(base_model_of(model).loss_type) is ForCausalLMLoss
