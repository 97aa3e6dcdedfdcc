"""Evaluation, prediction, callbacks and logs: Trainer's own, and each chunk's beside them."""

import math

import pytest
import torch
from training import largest_difference, make_trainer, weights
from transformers import EarlyStoppingCallback, TrainerCallback
from zoo import class_rows, token_rows


def test_logs_each_chunk_and_the_last_chunk_s_loss_as_the_loss(tmp_path):
    trainer = make_trainer(
        tmp_path,
        chunks={"num_chunks": 3, "alpha": 0.5, "readout_rows": 1.0},
        logging_steps=2,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss/chunk_3"], abs=1e-5)
        assert {k for k in row if "/" in k} == {f"{t}/chunk_{k}" for t in ("loss", "consistency") for k in (1, 2, 3)}
        assert 3.5 < row["loss/chunk_1"] < 5.0
        assert all(math.isfinite(row[k]) and row[k] >= 0 for k in row if "/" in k)


def test_without_consistency_in_the_first_chunk(tmp_path):
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 3, "alpha": 0.5, "consistency_first": False})
    trainer.train()
    row = trainer.state.log_history[0]
    assert "consistency/chunk_1" not in row and "consistency/chunk_2" in row


@pytest.mark.parametrize("readout", ["lm_head", "adapter", "bottleneck", "vocab", "blocks"])
def test_evaluation_per_chunk(tmp_path, readout):
    def metrics(prediction):
        return {"width": prediction.predictions.shape[-1]}

    trainer = make_trainer(
        tmp_path,
        chunks={"num_chunks": 3, "readout": readout},
        trainer={"eval_dataset": token_rows(5, (7,), seed=3), "compute_metrics": metrics},
    )
    trainer.train()
    plain, deep = trainer.evaluate(), trainer.evaluate(per_chunk=True)
    assert plain["eval_loss"] == deep["eval_loss"]
    assert {"eval_chunk_1_loss", "eval_chunk_2_loss"} <= deep.keys()
    assert deep["eval_chunk_1_width"] == 64
    assert 3.0 < deep["eval_chunk_1_loss"] < 6.0
    assert not any(stage.view.ports.left is not None for stage in trainer.stages)


def test_per_chunk_evaluation_reads_what_the_chunk_would_say(tmp_path):
    trainer = make_trainer(
        tmp_path,
        "bert",
        "SEQ_CLS",
        chunks={"num_chunks": 2, "readout": "lm_head"},
        max_steps=30,
        trainer={"eval_dataset": class_rows(24)},
    )
    trainer.train()
    metrics = trainer.evaluate(per_chunk=True)
    last_logged = [row for row in trainer.state.log_history if "loss/chunk_1" in row][-1]
    assert metrics["eval_chunk_1_loss"] < 1.05 * math.log(3)
    assert math.isfinite(last_logged["loss/chunk_1"])


def test_predict_and_callbacks_and_early_stopping(tmp_path):
    seen = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(("step", state.global_step))

        def on_substep_end(self, args, state, control, **kwargs):
            seen.append(("substep", state.global_step))

    trainer = make_trainer(
        tmp_path,
        chunks={"num_chunks": 2},
        max_steps=50,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        trainer={
            "eval_dataset": token_rows(4, seed=2),
            "callbacks": [Recorder(), EarlyStoppingCallback(early_stopping_patience=2)],
        },
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert seen[:2] == [("substep", 0), ("step", 1)]
    prediction = trainer.predict(token_rows(4, (6,), seed=2))
    assert prediction.predictions.shape == (4, 6, 64)
    assert "test_loss" in prediction.metrics


def test_looking_at_the_readouts_before_training_changes_nothing(tmp_path):
    runs = []
    for look in (False, True):
        trainer = make_trainer(
            tmp_path,
            chunks={"num_chunks": 2, "readout": "adapter"},
            model={"attention_dropout": 0.1},
            activation_checkpointing=True,
            neftune_noise_alpha=5.0,
            trainer={"eval_dataset": token_rows(4, seed=2)},
        )
        if look:
            trainer.evaluate(per_chunk=True)
            torch.manual_seed(0)
        else:
            trainer.evaluate()
            torch.manual_seed(0)
        trainer.train()
        assert any(getattr(m, "gradient_checkpointing", False) for m in trainer.stages[0].view.module.modules())
        runs.append(weights(trainer))
    assert largest_difference(*runs) == 0.0


def test_tensorboard_gets_the_chunks_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(tmp_path / "run", chunks={"num_chunks": 2}, report_to=["tensorboard"])
    trainer.train()
    (events,) = (tmp_path / "run").rglob("events.out.*")
    tags = EventAccumulator(str(events)).Reload().Tags()["scalars"]
    assert {"train/loss", "train/loss/chunk_1", "train/loss/chunk_2"} <= set(tags)


@pytest.mark.parametrize("settings", [{"chunks": {"train_chunks": [-1]}}, {"lora": {"layers_to_transform": [1, 2]}}])
def test_per_chunk_evaluation_leaves_out_chunks_that_do_not_learn(tmp_path, settings):
    settings = settings | {"chunks": {"num_chunks": 3} | settings.get("chunks", {})}
    trainer = make_trainer(tmp_path, **settings, trainer={"eval_dataset": token_rows(4, seed=2)})
    trainer.train()
    metrics = trainer.evaluate(token_rows(4, seed=2), None, "test", per_chunk=True)
    assert "test_loss" in metrics and "test_chunk_1_loss" not in metrics
    assert ("test_chunk_2_loss" in metrics) == ("lora" in settings)
