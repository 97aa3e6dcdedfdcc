"""The sequential runtime: activations of one chunk at a time, the same gradients with and without checkpointing."""

import pytest
import torch
from memory import SavedActivations
from peft import get_peft_model
from training import largest_difference, make_trainer, window_gradients
from zoo import class_rows, collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.runtime import SequentialRuntime
from peft_zerolock.stage import Entry
from peft_zerolock.staging import build_stages

CHECKPOINTING = {
    "none": None,
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
}


def _stages(num_chunks, blocks=6, checkpointing=None, **config):
    arguments = lora_arguments("llama", target_modules="all-linear")
    config = ZeroLockConfig(**arguments, num_chunks=num_chunks, **({"readout": "lm_head"} | config))
    model = get_peft_model(make_model("llama", num_hidden_layers=blocks, use_cache=False), config)
    if checkpointing is not None:
        model.get_base_model().activation_checkpointing_enable(activation_checkpointing_kwargs=checkpointing)
    model.train()
    return model, build_stages(model, config, sliced=True)


def _entry():
    batch = collate(token_rows(4).rows)
    return Entry(batch, (batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("mode", CHECKPOINTING.values(), ids=CHECKPOINTING)
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_nothing_is_held_after_a_chunk_s_backward(mode, num_chunks):
    model, stages = _stages(num_chunks, checkpointing=mode)
    held = []
    with SavedActivations(model.parameters()) as saved:

        def backward(objective):
            before = saved.held
            objective.backward()
            held.append((before, saved.held))

        SequentialRuntime(stages, backward).submit(_entry(), None)
    assert len(held) == num_chunks
    assert all(before > 0 and after == 0 for before, after in held)


def test_activations_are_those_of_the_largest_chunk():
    peaks = {}
    for num_chunks in (1, 2, 3):
        model, stages = _stages(num_chunks)
        with SavedActivations(model.parameters()) as saved:
            SequentialRuntime(stages, torch.Tensor.backward).submit(_entry(), None)
        peaks[num_chunks] = saved.peak
    assert peaks[2] < 0.6 * peaks[1]
    assert peaks[3] < 0.45 * peaks[1]


def test_h_is_handed_on_detached_and_before_the_local_backward():
    model, stages = _stages(2)
    order = []

    def backward(objective):
        order.append("backward")
        objective.backward()

    terms = stages[0].step(_entry(), lambda hidden: order.append(("sent", hidden.requires_grad)), None)
    backward(terms.objective)
    assert order == [("sent", False), "backward"]
    assert all(p.grad is not None for p in stages[0].adapters.values())
    assert all(p.grad is None for p in stages[1].adapters.values())


@pytest.mark.parametrize("readout", ["lm_head", "adapter", "bottleneck", "vocab", "blocks"])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_each_chunk_s_loss_trains_that_chunk_and_its_readout_alone(readout, alpha):
    vocab = torch.arange(10) if readout == "vocab" else None
    arguments = lora_arguments("llama")
    config = ZeroLockConfig(**arguments, num_chunks=3, readout=readout, alpha=alpha)
    model = get_peft_model(make_model("llama"), config)
    stages = build_stages(model, config, sliced=True, vocab=vocab)
    entry = _entry()
    for k, stage in enumerate(stages):
        sent = []
        terms = stage.step(entry, sent.append, None)
        terms.objective.backward()
        assert torch.isfinite(terms.objective)
        for other in stages:
            own = [p.grad is not None for p in [*other.adapters.values(), *other.readout.values()]]
            assert all(own) if other is stage else not any(own)
        model.zero_grad()
        for parameter in stage.readout.values():
            parameter.grad = None
        if k < 2:
            entry = Entry(entry.inputs, entry.count, sent[0])


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("mode", list(CHECKPOINTING)[1:])
def test_checkpointing_gives_the_same_gradients(tmp_path, task, num_chunks, mode):
    chunks = {"num_chunks": num_chunks}
    plain = window_gradients(make_trainer(tmp_path, task=task, chunks=chunks))
    checkpointed = window_gradients(
        make_trainer(
            tmp_path,
            task=task,
            chunks=chunks,
            activation_checkpointing=True,
            activation_checkpointing_kwargs=CHECKPOINTING[mode],
        )
    )
    assert any("lora_B" in name for name in plain)
    assert largest_difference(plain, checkpointed) <= 1e-7


def test_a_chunk_that_does_not_learn_has_no_graph_and_no_readout():
    arguments = lora_arguments("llama")
    config = ZeroLockConfig(**arguments, num_chunks=3, train_chunks=[2, -1], readout="adapter")
    model = get_peft_model(make_model("llama"), config)
    stages = build_stages(model, config, sliced=True)
    assert [stage.learns for stage in stages] == [False, True, True]
    assert not stages[0].readout and stages[1].readout
    with SavedActivations(model.parameters()) as saved:
        sent = []
        assert stages[0].step(_entry(), sent.append, None) is None
        assert saved.peak == 0
    assert len(sent) == 1
    frozen = {n for n, p in model.named_parameters() if "lora" in n and not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if "lora" in n and ".layers.0." in n}


def test_training_the_last_chunk_only_is_backpropagation_on_its_blocks(tmp_path):
    for name, task, data in (("llama", "CAUSAL_LM", token_rows(24)), ("bert", "SEQ_CLS", class_rows(24))):
        settings = {"name": name, "task": task, "data": data}
        ours = make_trainer(tmp_path, **settings, chunks={"num_chunks": 3, "train_chunks": [3], "logits_slice": None})
        stock = make_trainer(tmp_path, **settings, stock=True, lora={"layers_to_transform": [2]})
        start = {n: p for n, p in ours.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for n, p in stock.model.named_parameters():
                if p.requires_grad:
                    p.copy_(start[n])
        ours.train()
        stock.train()
        moved = {n: p for n, p in stock.model.named_parameters() if p.requires_grad}
        assert len(moved) >= 4
        for n, p in moved.items():
            assert torch.equal(p, ours.model.get_parameter(n)), n


def test_warm_up_trains_later_blocks_under_reentrant_checkpointing(tmp_path):
    chunks = {"num_chunks": 2, "readout": "blocks", "readout_warmup_ratio": 0.9}
    plain = window_gradients(make_trainer(tmp_path, chunks=chunks))
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    checkpointed = window_gradients(make_trainer(tmp_path, chunks=chunks, **settings))
    assert any(name.startswith("chunk_1.") for name in plain)
    assert largest_difference(plain, checkpointed) <= 1e-7
