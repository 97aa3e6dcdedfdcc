"""Readouts calibrated before training: they come to say what the model says, and nothing else changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from training import largest_difference, make_trainer, weights
from zoo import collate, token_rows

from peft_zerolock.calibration import calibrate, same_random_state, sample_batches
from peft_zerolock.stage import Entry

READOUTS = [
    ("llama", "CAUSAL_LM", {"readout": "blocks", "readout_blocks": 1}),
    ("llama", "CAUSAL_LM", {"readout": "adapter"}),
    ("llama", "CAUSAL_LM", {"readout": "bottleneck", "readout_dim": 8}),
    ("llama", "CAUSAL_LM", {"readout": "blocks", "readout_blocks": 1, "logits_slice": None}),
    ("bert", "SEQ_CLS", {"readout": "blocks", "readout_blocks": 1}),
]


def _gaps(trainer, batch):
    """KL(model || readout) of each lower chunk at all positions, or the distance of normed hidden states."""
    gaps = []
    with torch.no_grad():
        entry, received = Entry(batch, 1.0), []
        for stage in trainer.stages[:-1]:
            entry = stage.pass_on(entry)
            received.append(entry)
        last = trainer.stages[-1]
        goal = last.read(entry)
        for stage, entry in zip(trainer.stages, received, strict=False):
            read = stage.read(entry)
            if stage.tail is None:
                ours, theirs = (F.layer_norm(x, x.shape[-1:])[batch["attention_mask"] == 1] for x in (read, goal))
                gaps.append((ours - theirs).square().mean().item())
            else:
                ours, theirs = stage.tail(read.flatten(0, 1)), last.tail(goal.flatten(0, 1))
                gaps.append(
                    F.kl_div(
                        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean"
                    ).item()
                )
    return gaps


@pytest.mark.parametrize(("name", "task", "chunks"), READOUTS, ids=str)
def test_readouts_come_closer_to_the_model_and_adapters_stay(tmp_path, name, task, chunks):
    trainer = make_trainer(
        tmp_path,
        name,
        task,
        chunks={"chunk_sizes": [1, 1, 2], **chunks},
        lora={"r": 8, "target_modules": "all-linear"},
        model={"initializer_range": 0.3, "num_hidden_layers": 4},
    )
    stages, dataset = trainer.stages, trainer.train_dataset
    batch = {k: v for k, v in collate(dataset.rows[:8]).items() if k != "labels"}
    before, gaps = weights(trainer), _gaps(trainer, batch)
    heads = [n for stage in stages for n in stage.readout if "classifier" in n]
    frozen = {n: stages[0].readout[n].detach().clone() for n in heads if n in stages[0].readout}
    calibrate(stages, sample_batches(dataset, collate, 8, 60, 0), 0.02)
    for now, start in zip(_gaps(trainer, batch), gaps, strict=True):
        assert now < 0.7 * start
    assert largest_difference(before, weights(trainer)) == 0.0
    assert all(torch.equal(stages[0].readout[n], tensor) for n, tensor in frozen.items())
    assert bool(heads) == (task == "SEQ_CLS")
    assert all(p.grad is None for stage in stages for p in (*stage.adapters.values(), *stage.readout.values()))


def test_labels_are_not_read(tmp_path):
    """Which tokens the targets are changes nothing, only where they are."""
    results = []
    for shift in (0, 1):
        trainer = make_trainer(tmp_path, chunks={"num_chunks": 2})
        rows = copy.deepcopy(trainer.train_dataset.rows)
        for row in rows:
            row["labels"] = [label if label < 0 else 3 + (label + shift) % 60 for label in row["labels"]]
        calibrate(trainer.stages, [collate(rows[:4])], 0.01)
        results.append({n: p.detach().clone() for n, p in trainer.readouts.items()})
    assert largest_difference(*results) == 0.0


def test_the_run_s_data_order_and_random_state_stay(tmp_path):
    """The last chunk knows nothing of the readouts below: it trains as it would have, dropout on."""
    runs = []
    for steps in (0, 3):
        chunks = {
            "num_chunks": 2,
            "train_chunks": [1, 2],
            "chunk_starts": [0.9, 0],
            "readout_calibration_steps": steps,
        }
        trainer = make_trainer(tmp_path, chunks=chunks, lora={"lora_dropout": 0.3})
        trainer.train()
        runs.append((weights(trainer), {n: p.detach().clone() for n, p in trainer.readouts.items()}))
    assert largest_difference(runs[0][0], runs[1][0]) == 0.0
    assert largest_difference(runs[0][1], runs[1][1]) > 0.0


def test_random_rows_and_streams():
    rows = token_rows(10).rows
    seen = [batch for batch in sample_batches(rows, list, 4, 3, seed=1)]
    assert [len(batch) for batch in seen] == [4, 4, 4]
    assert seen == list(sample_batches(rows, list, 4, 3, seed=1)) != list(sample_batches(rows, list, 4, 3, seed=2))

    class Stream:
        def __iter__(self):
            return iter(range(5))

    assert list(sample_batches(Stream(), list, 4, 2, seed=0)) == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_the_random_state_is_put_back():
    state = torch.get_rng_state()
    with same_random_state():
        torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())
