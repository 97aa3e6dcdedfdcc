"""The control: it is a run of the last chunk only, and the better of the two stays."""

import math

import pytest
import torch
from training import largest_difference, make_trainer, weights
from transformers import TrainerCallback
from zoo import token_rows

from peft_zerolock.control import Control

ONE = {"num_chunks": 3}
KINDS = {
    "sliced": ("llama", "CAUSAL_LM", {}, {}),
    "whole logits": ("llama", "CAUSAL_LM", {"logits_slice": None}, {}),
    "a trained head": ("llama", "CAUSAL_LM", {}, {"modules_to_save": ["lm_head"]}),
    "classes": ("bert", "SEQ_CLS", {}, {}),
    "consistency": ("llama", "CAUSAL_LM", {"alpha": 0.6}, {}),
    "classes, consistency": ("bert", "SEQ_CLS", {"alpha": 0.6}, {}),
}


class Spoil(TrainerCallback):
    """Scrambles chunk 1 before each step."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        with torch.no_grad():
            for parameter in self.trainer.stages[0].adapters.values():
                parameter.normal_(std=3.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_a_run_of_the_last_chunk_only(tmp_path, kind, checkpointing):
    """Weights, losses and gradients' clipping; whatever happens to the lower chunks."""
    name, task, chunks, lora = KINDS[kind]
    settings = {"lora": lora, "max_steps": 5, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
    settings |= {"activation_checkpointing": checkpointing}
    alone = make_trainer(tmp_path, name, task, chunks=ONE | chunks | {"train_chunks": [-1]}, **settings)
    alone.train()
    beside = make_trainer(tmp_path, name, task, chunks=ONE | chunks | {"control": True}, **settings)
    beside.add_callback(Spoil(beside))
    beside.train()
    learned = {n: p.detach() for n, p in beside.stages[-1].control.adapters.items()}
    assert learned.keys() == beside.stages[-1].adapters.keys()
    assert largest_difference(learned, {n: weights(alone)[n] for n in learned}) == 0.0
    pairs = zip(alone.state.log_history, beside.state.log_history, strict=False)
    losses = [(a["loss/chunk_3"], b["loss/control"]) for a, b in pairs if "loss" in a]
    assert len(losses) == 5
    assert all(a == b for a, b in losses)


def test_where_lower_chunks_cost_quality_the_control_is_what_stays(tmp_path, caplog):
    settings = {"max_steps": 16, "per_device_train_batch_size": 8, "data": token_rows(8), "learning_rate": 3e-2}
    settings |= {"model": {"initializer_range": 0.3}, "lora": {"r": 8, "target_modules": "all-linear"}}
    alone = make_trainer(tmp_path, chunks=ONE | {"train_chunks": [-1]}, **settings)
    alone.train()
    spoilt = make_trainer(tmp_path, chunks=ONE | {"control": True}, **settings)
    spoilt.add_callback(Spoil(spoilt))
    spoilt.train()
    assert largest_difference(weights(alone), weights(spoilt)) == 0.0
    told = next(row for row in spoilt.state.log_history if "control/kept" in row)
    assert told["control/kept"] == 1.0
    gains = [a["loss/chunk_3"] - a["loss/control"] for a in spoilt.state.log_history if "loss/control" in a][-4:]
    assert told["control/gain"] == pytest.approx(sum(gains) / 4, abs=1e-5)
    assert caplog.text.count("The chunks below the last cost quality") == 1


@pytest.mark.parametrize(("name", "task"), [("llama", "CAUSAL_LM"), ("bert", "SEQ_CLS")])
def test_where_they_do_not_it_changes_nothing(tmp_path, caplog, name, task):
    """Dropout, the norm that is logged and the random numbers included."""
    settings = {"lora": {"lora_dropout": 0.2}, "max_steps": 12, "learning_rate": 2e-2}
    plain = make_trainer(tmp_path, name, task, chunks=ONE | {"readout_rows": 1.0}, **settings)
    plain.train()
    both = make_trainer(tmp_path, name, task, chunks=ONE | {"readout_rows": 1.0, "control": True}, **settings)
    both.train()
    told = next(row for row in both.state.log_history if "control/kept" in row)
    assert told["control/kept"] == 0.0
    assert largest_difference(weights(plain), weights(both)) == 0.0
    for one, other in zip(plain.state.log_history[:-1], both.state.log_history, strict=False):
        assert one == {key: value for key, value in other.items() if "control" not in key}
    assert "cost quality" not in caplog.text


def test_a_second_training_starts_a_new_comparison(tmp_path):
    trainer = make_trainer(tmp_path, chunks=ONE | {"control": True})
    for _ in range(2):
        trainer.train()
        assert len(trainer._control.gains) == 4


@pytest.fixture
def control(tmp_path):
    trainer = make_trainer(tmp_path, chunks=ONE | {"control": True})
    return Control(trainer.model, trainer.stages[-1])


def add(control, window, last, beside):
    control.add(window, {"chunk_3": torch.tensor(last), "control": torch.tensor(beside)})


def test_micro_batches_add_up_to_windows_and_processes_agree(control):
    for window in range(8):
        for _ in range(2):
            add(control, window, 1.0 + 0.1 * window, 1.0)
    messages = []
    control.settle(8, lambda values: messages.append(values) or values / 2)
    assert control.gains == pytest.approx([0.1 * window for window in range(8)])
    assert [message.shape for message in messages] == [(8,)]
    control.settle(8, lambda values: pytest.fail("nothing is new"))
    gain, noise = control.gain()
    assert gain == pytest.approx(0.65)
    assert noise == pytest.approx(0.1 / math.sqrt(2) / math.sqrt(2))


def test_a_window_without_targets_counts_as_no_difference(control):
    add(control, 1, 3.0, 2.0)
    control.settle(3)
    assert control.gains == [0.0, 1.0, 0.0]


def test_one_window_cannot_tell_gain_from_noise(control):
    assert control.gain() == (0.0, math.inf)
    add(control, 0, 3.0, 2.0)
    control.settle(1)
    assert control.gain() == (1.0, math.inf)


def test_two_rules_for_the_final_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="control=True and load_best_model_at_end=True.*leave one of them out"):
        make_trainer(
            tmp_path,
            chunks={"control": True},
            load_best_model_at_end=True,
            eval_strategy="steps",
            save_strategy="steps",
            trainer={"eval_dataset": []},
        )
