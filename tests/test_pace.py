"""When and how fast each chunk learns: chunk_starts, chunk_learning_rates."""

import pytest
import torch
from training import arguments, largest_difference, make_trainer, weights
from transformers import TrainerCallback

from peft_zerolock import ZeroLockTrainer


def moved_in_each_step(trainer) -> list[list[tuple[bool, bool]]]:
    """For each step and chunk, whether its adapters and its readout moved."""
    steps, before = [], {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            now = {
                s.index: [{n: p.detach().clone() for n, p in d.items()} for d in (s.adapters, s.readout)]
                for s in trainer.stages
            }
            if before:
                steps.append(
                    [
                        tuple(
                            any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(before[k], now[k], strict=True)
                        )
                        for k in now
                    ]
                )
            before.update(now)

    trainer.add_callback(Watch())
    trainer.train()
    return steps


@pytest.mark.parametrize("weights_of", ["own", "current"])
def test_each_chunk_s_adapters_wait_for_their_start(tmp_path, weights_of):
    """Readouts with parameters of their own learn from the first step."""
    chunks = {"num_chunks": 3, "chunk_starts": [0.8, 0.4, 0], "readout_weights": weights_of, "readout_rows": 1.0}
    trainer = make_trainer(tmp_path, chunks=chunks, max_steps=5)
    own = weights_of == "own"
    early, middle, late = [(False, own), (False, own), (True, False)], [(False, own), (True, own), (True, False)], None
    late = [(True, own), (True, own), (True, False)]
    assert moved_in_each_step(trainer) == [early, middle, middle, late]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["loss/chunk_1"] > 0 for entry in logs)  # it is read from the start


def test_the_last_chunk_may_start_late(tmp_path):
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "chunk_starts": [0, 0.5]}, max_steps=5)
    adapters = [[adapters for adapters, _ in step] for step in moved_in_each_step(trainer)]
    assert adapters == [[True, False], [True, False], [True, True], [True, True]]


def test_a_warmup_ratio_is_a_start_of_all_but_the_last(tmp_path):
    runs = []
    for pace in ({"readout_warmup_ratio": 0.5}, {"chunk_starts": [0.5, 0.5, 0]}):
        trainer = make_trainer(tmp_path, chunks={"num_chunks": 3, **pace}, lora={"lora_dropout": 0.2})
        trainer.train()
        runs.append(weights(trainer))
    assert largest_difference(*runs) == 0.0


def test_rates_are_factors_for_adapters_and_readouts(tmp_path):
    """A factor scales Adam's first step, whose size is the rate."""
    chunks = {"num_chunks": 3, "readout_learning_rate": 0.5}
    first = []
    for rates in (None, [0.1, 0.5, 2.0]):
        trainer = make_trainer(
            tmp_path, chunks={**chunks, "chunk_learning_rates": rates}, max_steps=1, lr_scheduler_type="constant"
        )
        before = weights(trainer)
        trainer.train()
        first.append({n: p - before[n] for n, p in weights(trainer).items()})
        for group in trainer.optimizer.param_groups:
            factor = dict(zip(["chunk_1", "chunk_2", "chunk_3"], rates or [1, 1, 1], strict=True))[group["chunk"]]
            readouts = {id(p) for p in trainer.readouts.values()}
            rate = 0.5 if id(group["params"][0]) in readouts else 1e-2
            assert group["lr"] == pytest.approx(rate * factor)
    plain, scaled = first
    for name in plain:
        factor = (0.1, 0.5, 2.0)[int(name.split(".layers.")[1][0])]
        assert torch.allclose(scaled[name], factor * plain[name], atol=1e-7)


def test_an_optimizer_of_one_s_own_has_its_own_rates(tmp_path):
    chunks = {"num_chunks": 2, "readout": "lm_head", "chunk_learning_rates": [0.1, 1]}
    model = make_trainer(tmp_path, chunks=chunks).model
    learned = [p for p in model.parameters() if p.requires_grad]
    trainer = ZeroLockTrainer(model, arguments(tmp_path), optimizers=(torch.optim.SGD(learned, lr=0.1), None))
    with pytest.raises(ValueError, match=r"chunk_learning_rates=\[0.1, 1\].*optimizer_cls_and_kwargs"):
        trainer.create_optimizer()
