"""The model up to one chunk, with that chunk's readout in place of the rest: what it would say if it stopped there."""

from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from .blocks import base_model_of
from .stage import Stage


class EarlyExit(nn.Module):
    """Runs the first stages one after the other and reads the last one's hidden state with its readout.

    Args:
        model: the PeftModel, for its loss function.
        stages: the first k stages.
    """

    def __init__(self, model: nn.Module, stages: list[Stage]):
        super().__init__()
        self.stages = stages
        self.base = base_model_of(model)
        tail = stages[-1].tail
        self.trees = nn.ModuleList([stage.view.module for stage in stages])
        self.tails = nn.ModuleDict(tail.modules() if tail is not None else {})

    def _get_name(self) -> str:
        """The model's own class name, by which Trainer's label smoothing tells causal LMs."""
        return self.base._get_name()

    def forward(self, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        """As the model's forward; the loss is the readout's."""
        hidden = None
        for stage in self.stages[:-1]:
            hidden, _ = self._run(stage, hidden, inputs)
        stage = self.stages[-1]
        if stage.tail is None:
            if labels is not None:
                inputs |= {"labels": labels}
            return self._run(stage, hidden, inputs)[1]
        read, _ = self._run(stage, hidden, inputs, leaves=False)
        states = read.flatten(0, 1)
        labels = send_to_device(labels, states.device)
        vocab = self.base.config.get_text_config().vocab_size
        known = labels[labels >= 0] if labels is not None else torch.empty(0, dtype=torch.long, device=states.device)
        stage.tail.restrict(known)
        with stage.autocast():
            logits = stage.tail(states)
        if stage.tail.restricted is not None:
            everything = logits.new_full((len(states), vocab), torch.finfo(logits.dtype).min)
            everything[:, stage.tail.restricted.rows] = logits
            logits = everything
        logits = logits.unflatten(0, read.shape[:2])
        loss = None
        if labels is not None:
            loss = self.base.loss_function(
                logits=logits, labels=labels, vocab_size=vocab, num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutput(loss=loss, logits=logits)

    def _run(self, stage: Stage, hidden: Any, inputs: dict[str, Any], leaves: bool = True) -> tuple[Any, Any]:
        ports = stage.view.ports
        inputs, ports.received = send_to_device((inputs, hidden), stage.device)
        ports.last_position_only = stage.tail is not None
        try:
            outputs = stage.view.module(**inputs)
            return (ports.left if leaves else ports.read), outputs
        finally:
            ports.clear()
