"""The sliced objective equals the formula written down directly, in value and gradient, and keeps no logits."""

import gc

import pytest
import torch
import torch.nn.functional as F
from counting import MemoryCounter
from torch import nn

from peft_zerolock.objective import TokenObjective, divergence, output_consistency, supervised_tokens


class SoftCappedHead(nn.Module):
    def __init__(self, hidden=8, vocab=50):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, states):
        return 5.0 * torch.tanh(self.head(self.norm(states)) / 5.0)


def direct(head, hidden, targets, count, previous, alpha, direction, smoothing):
    log_p = head(hidden).double().log_softmax(-1)
    nll = -log_p.gather(1, targets[:, None]).sum()
    task = ((1 - smoothing) * nll + smoothing * (-log_p.mean(-1)).sum()) / count
    if previous is None or alpha == 1:
        return task
    log_q = head(previous).detach().double().log_softmax(-1)
    if direction == "forward":
        each = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        each = (log_q.exp() * (log_q - log_p)).sum(-1)
    return alpha * task + (1 - alpha) * each.sum() / count


@pytest.mark.parametrize("slice_size", [1, 4, 7, 100])
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_the_formula(slice_size, alpha, direction, smoothing):
    head = SoftCappedHead()
    hidden, previous = torch.randn(13, 8, requires_grad=True), torch.randn(13, 8)
    targets = torch.randint(0, 50, (13,))
    objective = TokenObjective(head, list(head.parameters()), slice_size, alpha, direction, smoothing)
    terms = objective(hidden, targets, 20.0, previous)
    terms.objective.backward()
    found = [hidden.grad, *(p.grad for p in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    expected = direct(head, hidden, targets, 20.0, previous, alpha, direction, smoothing)
    expected.backward()
    assert abs(terms.objective.item() - expected.item()) < 1e-6
    for ours, theirs in zip(found, [hidden.grad, *(p.grad for p in head.parameters())], strict=True):
        assert (ours - theirs).abs().max() < 1e-6
    assert (terms.consistency is None) == (alpha == 1)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_loss_scale_cancels_out(scale):
    head, hidden = SoftCappedHead(), torch.randn(5, 8, requires_grad=True)
    targets = torch.randint(0, 50, (5,))
    objective = TokenObjective(head, [], 2)
    (objective(hidden, targets, 5.0, grad_scale=scale).objective * scale).backward()
    scaled = hidden.grad / scale
    hidden.grad = None
    objective(hidden, targets, 5.0).objective.backward()
    assert torch.allclose(scaled, hidden.grad, atol=1e-7)


def test_frozen_parameters_and_no_grad_cost_no_backward():
    head, hidden = SoftCappedHead().requires_grad_(False), torch.randn(5, 8)
    terms = TokenObjective(head, list(head.parameters()), 2)(hidden, torch.zeros(5, dtype=torch.long), 5.0)
    assert not terms.objective.requires_grad
    assert terms.task.item() == pytest.approx(F.cross_entropy(head(hidden), torch.zeros(5, dtype=torch.long)).item())


def _peak_of(tokens, slice_size, vocab=4000):
    head = SoftCappedHead(vocab=vocab).requires_grad_(False)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    gc.collect()
    with MemoryCounter() as counted:
        TokenObjective(head, [], slice_size)(hidden, targets, float(tokens)).objective.backward()
    return counted.peak


def test_extra_memory_is_that_of_a_slice_whatever_the_batch():
    small, large, whole = _peak_of(64, 16), _peak_of(1024, 16), _peak_of(1024, 1024)
    states = 1024 * 8 * 4
    assert large <= small + 8 * states
    assert whole > 10 * large


def test_supervised_tokens_are_those_whose_next_token_is_a_target():
    labels = torch.tensor([[-100, 5, 6, -100], [7, -100, -100, 8]])
    mask, targets = supervised_tokens({"labels": labels})
    assert mask.tolist() == [[True, True, False, False], [False, False, True, False]]
    assert targets.tolist() == [5, 6, 8]
    shifted = torch.tensor([[5, -100, 6, -100]])
    mask, targets = supervised_tokens({"labels": labels[:1], "shift_labels": shifted})
    assert mask.tolist() == [[True, False, True, False]]
    assert targets.tolist() == [5, 6]


def test_consistency_of_classes_positions_and_values():
    logits, previous = torch.randn(4, 3), torch.randn(4, 3)
    p, q = logits.softmax(-1), previous.softmax(-1)
    expected = (p * (p / q).log()).sum() / 8
    assert output_consistency(logits, previous, None, 8, "forward", None).item() == pytest.approx(expected.item())
    expected = (q * (q / p).log()).sum() / 8
    assert output_consistency(logits, previous, None, 8, "reverse", None).item() == pytest.approx(expected.item())
    labels = torch.tensor([[1, -100], [-100, 2]])
    tokens, before = logits.view(2, 2, 3), previous.view(2, 2, 3)
    each = divergence(tokens.log_softmax(-1), before.log_softmax(-1), "forward")
    expected = (each[0, 0] + each[1, 1]) / 2
    assert output_consistency(tokens, before, labels, 2, "forward", None).item() == pytest.approx(expected.item())
    values, last = torch.randn(4, 1), torch.randn(4, 1)
    expected = (values - last).square().sum() / 4
    kind = "regression"
    assert output_consistency(values, last, None, 4, "forward", kind).item() == pytest.approx(expected.item())
    p, q = logits.sigmoid(), previous.sigmoid()
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum() / 12
    kind = "multi_label_classification"
    assert output_consistency(logits, previous, None, 12, "forward", kind).item() == pytest.approx(expected.item())
