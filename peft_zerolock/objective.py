"""The local objective of a chunk: alpha * task term + (1 - alpha) * consistency term (paper, "Local objective").

Both terms are sums over the supervised positions divided by the same count, that of the whole update window, so that
splitting a window into micro-batches changes nothing. Terms are computed in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RECONSTRUCTION_WEIGHT = 10.0


@dataclass
class Terms:
    """The local objective of one chunk on one micro-batch.

    Attributes:
        objective: what the chunk minimises, a scalar with a graph.
        task: task term, detached.
        consistency: consistency term, detached; None where the chunk has none.
    """

    objective: Tensor
    task: Tensor
    consistency: Tensor | None = None


def divergence(log_p: Tensor, log_q: Tensor, direction: str) -> Tensor:
    """KL divergence between two distributions given by log-probabilities `(..., classes)`, one value per position.

    Args:
        log_p: log p_k.
        log_q: log p_{k-1}.
        direction: `"forward"`: KL(p_k || p_{k-1}), the paper's; `"reverse"`: KL(p_{k-1} || p_k).
    """
    if direction == "reverse":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def mix(task: Tensor, consistency: Tensor | None, alpha: float) -> Terms:
    """Puts the two terms together."""
    objective = task if consistency is None else alpha * task + (1 - alpha) * consistency
    return Terms(objective, task.detach(), None if consistency is None else consistency.detach())


@dataclass
class TokenObjective:
    """The local objective over supervised tokens, a slice of them at a time.

    The backward pass of a slice runs inside the forward pass, so no logits are kept: the extra memory is
    O(slice x vocabulary), whatever the number of tokens.

    Args:
        logits_of: turns hidden states `(tokens, hidden)` into logits `(tokens, vocab)`; the model's own tail.
        parameters: the tail's trainable parameters, which get a gradient too.
        slice_size: tokens per slice.
        alpha: weight of the task term; with 1, `previous` is not read.
        direction: see `divergence`.
        label_smoothing: as in TrainingArguments: (1 - s) * NLL + s * mean of -log p over the vocabulary.
        reference: what turns `previous` into logits; default: `logits_of`.
    """

    logits_of: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    slice_size: int
    alpha: float = 1.0
    direction: str = "forward"
    label_smoothing: float = 0.0
    reference: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self,
        hidden: Tensor,
        targets: Tensor,
        count: Tensor | float,
        previous: Tensor | None = None,
        grad_scale: float = 1.0,
    ) -> Terms:
        """The objective of `hidden` `(tokens, hidden)` for `targets` `(tokens,)`.

        Args:
            count: supervised tokens of the whole update window.
            previous: the hidden states `(tokens, hidden)` whose readout is p_{k-1}.
            grad_scale: loss scale of mixed precision, at which the inner backward pass runs.
        """

        def terms_of(states: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
            logits = self.logits_of(states).float()
            nll = F.cross_entropy(logits, targets[start:stop], reduction="sum", label_smoothing=self.label_smoothing)
            task = nll / count
            if previous is None or self.alpha == 1:
                return task, task.detach(), torch.zeros_like(task)
            with torch.no_grad():
                log_q = (self.reference or self.logits_of)(previous[start:stop]).float().log_softmax(-1)
            consistency = divergence(logits.log_softmax(-1), log_q, self.direction).sum() / count
            return self.alpha * task + (1 - self.alpha) * consistency, task.detach(), consistency.detach()

        trained = [p for p in self.parameters if p.requires_grad] if torch.is_grad_enabled() else []
        objective, task, consistency = _Sliced.apply(hidden, terms_of, self.slice_size, grad_scale, *trained)
        has_consistency = previous is not None and self.alpha < 1
        return Terms(objective, task, consistency if has_consistency else None)


class _Sliced(torch.autograd.Function):
    """Sums `terms_of` over slices of `hidden` and takes the gradients on the way."""

    @staticmethod
    def forward(ctx, hidden, terms_of, slice_size, grad_scale, *parameters):
        inputs = [hidden, *parameters]
        needed = [i for i, needs in enumerate((ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])) if needs]
        gradients: list[Any] = [None] * len(inputs)
        if 0 in needed:
            gradients[0] = torch.zeros_like(hidden)
        totals = [torch.zeros((), dtype=torch.float32, device=hidden.device) for _ in range(3)]
        for start in range(0, len(hidden), slice_size):
            stop = min(start + slice_size, len(hidden))
            with torch.enable_grad():
                states = hidden[start:stop].detach().requires_grad_(0 in needed)
                terms = terms_of(states, start, stop)
                sources = [states if i == 0 else inputs[i] for i in needed]
                found = torch.autograd.grad(terms[0] * grad_scale, sources, allow_unused=True) if needed else ()
            for i, gradient in zip(needed, found, strict=True):
                if gradient is None:
                    continue
                if i == 0:
                    gradients[0][start:stop] = gradient
                else:
                    gradients[i] = gradient if gradients[i] is None else gradients[i] + gradient
            for total, term in zip(totals, terms, strict=True):
                total += term.detach()
        ctx.gradients, ctx.grad_scale = gradients, grad_scale
        ctx.mark_non_differentiable(totals[1], totals[2])
        return tuple(totals)

    @staticmethod
    def backward(ctx, grad_objective, *_):
        factor = grad_objective / ctx.grad_scale
        scaled = [None if g is None else g * factor.to(g.dtype) for g in ctx.gradients]
        ctx.gradients = None
        return scaled[0], None, None, None, *scaled[1:]


def reconstruction(
    decoded: Tensor, entered: Tensor, inputs: dict[str, Any], count: Tensor | float, by_token: bool
) -> Terms:
    """LoPT's objective (arXiv 2605.04913): how well a decoder of h_k tells h_{k-1}, as a mean squared error, times 10.

    Args:
        decoded: of h_k, `(batch, seq, hidden)`.
        entered: h_{k-1}, detached.
        inputs: the model's.
        count: supervised positions of the whole update window.
        by_token: of a causal LM, the errors at the supervised positions are added up. Otherwise a row's mean over its
            attended positions stands for each of its labels.
    """
    errors = (decoded.float() - entered.float()).square().mean(-1)
    if by_token:
        loss = errors[supervised_tokens(inputs)[0]].sum()
    else:
        attended = inputs.get("attention_mask", torch.ones_like(errors)).to(errors.dtype)
        rows, labels = (errors * attended).sum(-1) / attended.sum(-1), inputs.get("labels")
        loss = rows.mean() if labels is None else rows @ (labels != -100).reshape(len(rows), -1).sum(-1).to(rows.dtype)
    return mix(RECONSTRUCTION_WEIGHT * loss / count, None, 1.0)


def output_consistency(
    logits: Tensor, previous: Tensor, labels: Tensor | None, count: Tensor | float, direction: str, kind: str | None
) -> Tensor:
    """The consistency term of whole outputs: sequence or token classes, regression values, or unsliced tokens.

    Args:
        logits: of chunk k, `(batch, classes)` or `(batch, seq, classes)`.
        previous: of chunk k - 1, without gradient.
        labels: `(batch, seq)` aligned with the logits; positions of -100 are left out. None: all rows count.
        count: supervised positions of the whole update window.
        kind: the model's `problem_type`. With "regression" the outputs are values, and their divergence is the squared
            difference; with "multi_label_classification" each output is a distribution over yes and no.
    """
    if kind == "regression":
        return (logits.float() - previous.float()).square().sum() / count
    if kind == "multi_label_classification":
        logits, previous = (torch.stack([x, torch.zeros_like(x)], dim=-1) for x in (logits, previous))
    each = divergence(logits.float().log_softmax(-1), previous.float().log_softmax(-1), direction)
    if labels is not None:
        each = each[labels.to(each.device) != -100]
    return each.sum() / count


def supervised_tokens(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Which positions of a causal LM's batch are supervised, and their target tokens.

    Returns:
        A mask `(batch, seq)` of the positions whose next token is a target, and the targets `(tokens,)`.
    """
    shifted = inputs.get("shift_labels")
    if shifted is None:
        shifted = F.pad(inputs["labels"], (0, 1), value=-100)[..., 1:]
    mask = shifted != -100
    return mask, shifted[mask]
