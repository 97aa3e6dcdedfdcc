"""How far a chunk's loss looks ahead: from the bare tail (the paper) to backpropagation's own gradient."""

import pytest
import torch
from memory import SavedActivations
from peft import get_peft_model
from training import make_trainer, window_gradients
from zoo import class_rows, collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.runtime import SequentialRuntime
from peft_zerolock.stage import Entry, learning_rows
from peft_zerolock.staging import build_stages

TASKS = [("llama", "CAUSAL_LM"), ("opt", "CAUSAL_LM"), ("bert", "SEQ_CLS"), ("deberta", "SEQ_CLS")]


def _adapted(name, task, seed=3, **config):
    """A model in the middle of training: no adapter is at its start."""
    model = get_peft_model(make_model(name, task), ZeroLockConfig(**lora_arguments(name, task), **config))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def _stages(model, task):
    return build_stages(model, model.peft_config["default"], sliced=task == "CAUSAL_LM")


def _entry(task, number=4, **more):
    batch = collate((token_rows(number) if task == "CAUSAL_LM" else class_rows(number)).rows)
    labels = batch["labels"][:, 1:] if task == "CAUSAL_LM" else batch["labels"]
    return Entry(batch, (labels != -100).sum(), **more)


def _mean_loss(view, inputs, with_outputs, share):
    outputs = view(**inputs)
    return outputs.loss, outputs


def _local_gradients(stages, entry):
    SequentialRuntime(stages, torch.Tensor.backward).submit(entry, _mean_loss)
    found = {n: p.grad.clone() for stage in stages for n, p in stage.adapters.items()}
    for stage in stages:
        for parameter in (*stage.adapters.values(), *stage.readout.values()):
            parameter.grad = None
    return found


def _backpropagation(model, entry):
    inputs, model = dict(entry.inputs), model.train()
    causal = inputs["labels"].dim() == 2
    model(**inputs, **({"num_items_in_batch": entry.count} if causal else {})).loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("name", "task"), TASKS, ids=lambda value: value)
def test_all_the_rest_with_current_weights_is_backpropagation(name, task):
    config = {"num_chunks": 3, "readout_weights": "current", "readout_rows": 1.0}
    model = _adapted(name, task, **config)
    stages, entry = _stages(model, task), _entry(task)
    for seed in (4, 5):
        ours, expected = _local_gradients(stages, entry), _backpropagation(model, entry)
        assert ours.keys() == expected.keys()
        assert max((ours[n] - expected[n]).abs().max().item() for n in ours) < 1e-6
        torch.manual_seed(seed)  # the next update window; the second one as loading a state may do it
        for parameter in model.parameters():
            if parameter.requires_grad and seed == 4:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.requires_grad:
                parameter.data = parameter.data + 0.1


def test_current_weights_are_never_trained_by_the_chunks_below():
    model = _adapted("bert", "SEQ_CLS", num_chunks=3, readout_weights="current", readout_rows=1.0)
    stages = _stages(model, "SEQ_CLS")
    assert all(not stage.readout and not stage.copies for stage in stages)
    stages[0].step(_entry("SEQ_CLS"), None, _mean_loss).objective.backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None}
    assert got == set(stages[0].adapters)


@pytest.mark.parametrize(("name", "task"), TASKS, ids=lambda value: value)
def test_no_later_block_is_the_paper_s_readout(name, task):
    entry, found = _entry(task), []
    for readout in ({"readout_blocks": 0}, {"readout": "lm_head"}):
        model = _adapted(name, task, num_chunks=3, **readout)
        found.append(_local_gradients(_stages(model, task), entry))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize(
    ("reach", "later", "blocks"),
    [(0, 4, 0), (2, 4, 2), (2, 1, 1), ("all", 4, 4), (0.5, 4, 2), (0.5, 3, 2), (0.01, 3, 1), (0.5, 0, 0)],
)
def test_reach_is_a_number_a_share_or_everything(reach, later, blocks):
    assert ZeroLockConfig(readout_blocks=reach).reach(later) == blocks


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("share", [0.25, 1 / 3, 0.5, 0.6, 1.0])
def test_the_same_rows_learn_however_the_window_is_split(share, first):
    def chosen(*sizes):
        rows, start = [], first
        for size in sizes:
            entry = Entry({"input_ids": torch.zeros(size, 1)}, 1.0, first_row=start)
            rows += [start + i for i in learning_rows(entry, share)]
            start += size
        return rows

    whole = chosen(60)
    assert len(whole) == round(60 * share)
    assert chosen(*[1] * 60) == chosen(20, 20, 20) == chosen(7, 53) == whole


@pytest.mark.parametrize(("name", "task"), TASKS, ids=lambda value: value)
def test_a_chunk_learns_from_its_rows_alone_and_hands_all_of_them_on(name, task):
    model = _adapted(name, task, chunk_sizes=[2, 1], readout_blocks=1, readout_rows=0.5)
    stages, entry, sent, other = _stages(model, task), _entry(task, 4), [], []
    stages[0].step(entry, sent.append, _mean_loss).objective.backward()
    ours = {n: p.grad.clone() for n, p in stages[0].adapters.items()}
    stages[0].row_share = 1.0
    stages[0].step(entry, other.append, _mean_loss)
    assert torch.allclose(sent[0], other[0], atol=1e-6)
    for parameter in stages[0].adapters.values():
        parameter.grad = None
    stages[0].step(entry.take([1, 3], 0.5), None, _mean_loss).objective.backward()
    assert max((ours[n] - p.grad).abs().max().item() for n, p in stages[0].adapters.items()) == 0.0


@pytest.mark.parametrize("logits_slice", [256, None])
@pytest.mark.parametrize("weights", ["own", "current"])
def test_6x1_3x2_and_2x3_micro_batches_give_equal_gradients(tmp_path, weights, logits_slice):
    chunks = {"num_chunks": 3, "readout_weights": weights}
    found = []
    for batch, accumulation in ((6, 1), (3, 2), (2, 3), (1, 6)):
        trainer = make_trainer(
            tmp_path,
            chunks=chunks | {"logits_slice": logits_slice},
            data=token_rows(6),
            max_steps=1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        found.append(window_gradients(trainer))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert max((other[n] - found[0][n]).abs().max().item() for n in other) < 1e-6


def test_windows_of_one_row_take_turns(tmp_path):
    trainer = make_trainer(
        tmp_path,
        chunks={"num_chunks": 2, "readout_rows": 0.5},
        per_device_train_batch_size=1,
        max_steps=6,
    )
    trainer.train()
    losses = [entry["loss/chunk_1"] for entry in trainer.state.log_history if "loss/chunk_1" in entry]
    assert [loss > 0 for loss in losses] == [False, True] * 3


def test_rows_without_targets_are_not_learnt_from():
    model = _adapted("bert", "TOKEN_CLS", num_chunks=2, readout_rows=0.5)
    batch = collate(token_rows(2).rows)
    batch["labels"] = batch["labels"].clamp(max=2)
    batch["labels"][1] = -100
    assert learning_rows(Entry(batch, 1.0), 0.5) == [1]
    sent = []
    assert _stages(model, "TOKEN_CLS")[0].step(Entry(batch, 1.0), sent.append, _mean_loss) is None
    assert sent[0].shape[0] == 2


@pytest.mark.parametrize("rows", [1, 2, 12])
def test_auto_rows_keep_the_activations_of_the_chunk_alone(rows):
    peaks = {}
    for name, chunks in {
        "tail": {"readout": "lm_head"},
        "all": {"readout_rows": 1.0},
        "auto": {},
    }.items():
        config = ZeroLockConfig(**lora_arguments("llama", target_modules="all-linear"), num_chunks=3, **chunks)
        model = get_peft_model(make_model("llama", num_hidden_layers=12, use_cache=False), config).train()
        stages, entry = build_stages(model, config, sliced=True), _entry("CAUSAL_LM", rows, first_row=2)
        with SavedActivations(model.parameters()) as saved:
            SequentialRuntime(stages, torch.Tensor.backward).submit(entry, _mean_loss)
        peaks[name] = saved.peak
    assert peaks["all"] > 2 * peaks["tail"]
    assert peaks["auto"] < 1.4 * peaks["tail"]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bert"])
def test_checkpointed_readouts_change_no_gradient(name):
    task = "SEQ_CLS" if name == "bert" else "CAUSAL_LM"
    model, calls, found = _adapted(name, task, num_chunks=3), [], []
    stages, entry = _stages(model, task), _entry(task, 2)
    assert stages[0].row_share == pytest.approx(1 / 3) and stages[0]._outgrows(1, 1)
    readout = [m for m in stages[0].view.module.modules() if getattr(m, "kind", "") == "readout"]
    readout[0].block.register_forward_pre_hook(lambda *_: calls.append(1))
    for rows in (1.0, "auto"):  # two of two rows: no promise, then one that needs checkpoints
        stages[0].config.readout_rows, stages[0].row_share = rows, 1 - 1e-9
        stages[0].step(entry, lambda hidden: None, _mean_loss).objective.backward()
        found.append({n: p.grad.clone() for n, p in (stages[0].adapters | stages[0].readout).items()})
        for parameter in (stages[0].adapters | stages[0].readout).values():
            parameter.grad = None
    assert len(calls) == 3  # forward; forward and again
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert min(found[0][name].abs().max() for name in stages[0].adapters) > 0
