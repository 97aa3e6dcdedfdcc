"""The stages' local objectives equal the paper's formula, written down directly on the whole model."""

import pytest
import torch
from peft import get_peft_model
from test_stage import _cut_by_detach, _gradients
from zoo import collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.stage import Entry
from peft_zerolock.staging import build_stages, dissect


def _tail(model, hidden):
    """Gemma 2's own tail: final norm, head, soft cap."""
    base = model.get_base_model()
    cap = base.config.final_logit_softcapping
    return torch.tanh(base.lm_head(base.model.norm(hidden)) / cap) * cap


def _formula(states, embeddings, targets, mask, model, alpha, smoothing, direction, first):
    """sum over k of alpha * task_k + (1 - alpha) * KL(p_k || sg(p_{k-1})), means over the supervised positions."""
    total, previous = 0.0, embeddings
    for k, hidden in enumerate(states):
        log_p = _tail(model, hidden)[mask].double().log_softmax(-1)
        nll = -log_p.gather(1, targets[:, None]).mean()
        task = (1 - smoothing) * nll - smoothing * log_p.mean(-1).mean()
        with torch.no_grad():
            log_q = _tail(model, previous)[mask].double().log_softmax(-1)
        if direction == "forward":
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        else:
            divergence = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
        if alpha == 1 or (k == 0 and not first):
            total = total + task
        else:
            total = total + alpha * task + (1 - alpha) * divergence
        previous = hidden
    return total


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("alpha", "smoothing", "direction", "first"),
    [(1.0, 0.0, "forward", True), (0.5, 0.1, "forward", True), (0.3, 0.0, "reverse", False)],
)
def test_the_local_objectives_are_the_paper_s(num_chunks, alpha, smoothing, direction, first):
    config = ZeroLockConfig(
        **lora_arguments("gemma2"),
        num_chunks=num_chunks,
        readout="lm_head",
        alpha=alpha,
        consistency=direction,
        consistency_first=first,
        logits_slice=3,
    )
    model = get_peft_model(make_model("gemma2", num_hidden_layers=4, final_logit_softcapping=2.0), config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    batch = collate(token_rows(4).rows)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    mask = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:] != -100
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:][mask]
    stages = build_stages(model, config, sliced=True, label_smoothing=smoothing)
    entry, total = Entry(batch, mask.sum()), 0.0
    for stage in stages:
        sent = []
        terms = stage.step(entry, sent.append, None)
        terms.objective.backward()
        total += terms.objective.item()
        entry = Entry(batch, mask.sum(), sent[0])
    ours = _gradients(model)

    _, chunks, _ = dissect(model, config)
    captured = {}
    hooks = [
        model.get_base_model()
        .model.layers[0]
        .register_forward_pre_hook(lambda module, args: captured.__setitem__("embeddings", args[0])),
        model.get_base_model()
        .model.layers[3]
        .register_forward_hook(lambda module, args, output: captured.__setitem__("last", output)),
    ]
    left, _ = _cut_by_detach(model, [chunk.start for chunk in chunks[1:]], inputs)
    for hook in hooks:
        hook.remove()
    states = [*left, captured["last"]]
    expected = _formula(states, captured["embeddings"], targets, mask, model, alpha, smoothing, direction, first)
    expected.backward()
    reference = _gradients(model)
    assert abs(total - expected.item()) < 1e-6 * max(1.0, abs(expected.item()))
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert (ours[name] - gradient).abs().max() < 1e-6


def test_a_mixture_of_experts_with_a_consistency_term():
    arguments = lora_arguments("mixtral")
    config = ZeroLockConfig(**arguments, num_chunks=2, alpha=0.5, readout_rows=1.0)
    model = get_peft_model(make_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5), config)
    stages = build_stages(model, config, sliced=True)
    batch = collate(token_rows(4).rows)
    entry = Entry(batch, (batch["labels"][:, 1:] != -100).sum())
    terms = stages[0].step(entry, None, None)
    assert terms.consistency > 0
    assert terms.task > 4.0 + 0.5  # the balance term of top-2 of 4 experts is near 2, times 0.5


def test_a_readout_s_routers_are_not_the_chunk_s():
    batch = collate(token_rows(4).rows)
    balance = {}
    for readout in ("lm_head", "blocks"):
        config = ZeroLockConfig(**lora_arguments("mixtral"), num_chunks=3, readout=readout)
        model = get_peft_model(make_model("mixtral", output_router_logits=True), config)
        view = build_stages(model, config, sliced=True)[0].view
        view.module.eval()
        outputs = view.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        balance[readout] = outputs.aux_loss.item()
        assert len(outputs.router_logits) == 1
    assert balance["lm_head"] == balance["blocks"]
