"""The concurrent runtime gives the weights, logs and checkpoints of the sequential one, to the bit, on the CPU."""

import copy
import json
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import losses, make_trainer, snapshot
from torch import Tensor
from zoo import token_rows

from peft_zerolock import ZeroLockTrainer
from peft_zerolock.driving import FinishedWindows
from peft_zerolock.runtime import ConcurrentRuntime
from peft_zerolock.stage import Stage


def trained(folder: Any, runtime: str, resume: str | None = None, **run: Any) -> ZeroLockTrainer:
    """A run of a four-block model with dropout."""
    run = copy.deepcopy(run)
    model = {"num_hidden_layers": 4} | run.pop("model", {})
    config = {"lora_dropout": 0.2} | run.pop("config", {})
    trainer = make_trainer(folder, config=config, model=model, runtime=runtime, **run)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def everything(trainer: ZeroLockTrainer) -> dict[str, Tensor]:
    """Weights, readouts and optimizer state."""
    tensors = snapshot(trainer.model) | {name: p.detach().clone() for name, p in trainer.readouts.items()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items() if torch.is_tensor(value)}
    return tensors


def logs(trainer: ZeroLockTrainer) -> list[dict[str, Any]]:
    """What was logged on the way, without times."""
    return [
        {key: value for key, value in entry.items() if "runtime" not in key and "per_second" not in key}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]


def assert_same(one: ZeroLockTrainer, other: ZeroLockTrainer) -> None:
    first, second = everything(one), everything(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert one.lr_scheduler.state_dict() == other.lr_scheduler.state_dict()
    assert logs(one) == logs(other)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    chunks=st.integers(2, 4),
    accumulation=st.integers(1, 4),
    rows=st.integers(5, 15),
    depth=st.integers(1, 3),
    log_every=st.integers(1, 4),
    batch=st.integers(1, 3),
    alpha=st.sampled_from([1.0, 0.6]),
    dropout=st.sampled_from([0.0, 0.3]),
    readout=st.sampled_from(["lm_head", "adapter", "blocks", "vocab", "bottleneck"]),
    sliced=st.booleans(),
    clip=st.sampled_from([0.0, 0.05, 1.0]),
    share=st.sampled_from([1.0, 0.5]),
)
def test_the_same_as_sequential_to_the_bit(
    tmp_path_factory,
    chunks,
    accumulation,
    rows,
    depth,
    log_every,
    batch,
    alpha,
    dropout,
    readout,
    sliced,
    clip,
    share,
):
    """Uneven last batches and windows, rows of uneven lengths, two epochs."""
    config = {"num_chunks": chunks, "alpha": alpha, "lora_dropout": dropout, "readout": readout, "readout_rows": share}
    if not sliced and readout in ("lm_head", "adapter", "blocks"):
        config["logits_slice"] = None
    run = {
        "config": config,
        "rows": rows,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": batch,
        "logging_steps": log_every,
        "max_grad_norm": clip,
        "max_steps": -1,
        "num_train_epochs": 2,
    }
    folder = tmp_path_factory.mktemp("run")
    sequential = trained(folder, "sequential", **run)
    concurrent = trained(folder, "concurrent", in_flight_depth=depth, devices=["cpu"] * chunks, **run)
    assert_same(sequential, concurrent)
    train_losses = [trainer.state.log_history[-1]["train_loss"] for trainer in (sequential, concurrent)]
    assert train_losses[0] == train_losses[1]
    assert sequential.state.global_step > 0


RUNS: dict[str, dict[str, Any]] = {
    "more stages than micro-batches": {"config": {"num_chunks": 4}, "max_steps": 1},
    "bf16": {"bf16": True, "config": {"modules_to_save": ["lm_head"], "alpha": 0.7}},
    "checkpointing": {"activation_checkpointing": True},
    "reentrant checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "a classifier": {
        "name": "bert",
        "task": "SEQ_CLS",
        "model": {"hidden_dropout_prob": 0.2, "classifier_dropout": 0.1},
        "gradient_accumulation_steps": 3,
    },
    "control": {"config": {"num_chunks": 3, "control": True}, "learning_rate": 0.3, "max_steps": 6},
    "control that stays": {
        "config": {"readout": "lm_head", "control": True, "lora_dropout": 0.0},
        "learning_rate": 1.0,
        "max_steps": 8,
    },
    "reconstruction": {"config": {"num_chunks": 3, "objective": "reconstruction"}},
    "one chunk trained": {"config": {"num_chunks": 3, "train_chunks": [2]}},
    "one chunk": {"config": {"num_chunks": 1, "lora_dropout": 0.0}},
    "readout warm-up": {"config": {"readout": "adapter", "readout_warmup_ratio": 0.5, "readout_learning_rate": 0.1}},
    "adafactor": {"optim": "adafactor"},
    "sgd with momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1},
    "a cosine rate with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 6},
    "label smoothing": {"label_smoothing_factor": 0.1, "config": {"logits_slice": None}},
    "evaluation and saves between": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 5,
        "load_best_model_at_end": True,
    },
    "a rate that falls on a plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1e9},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 4,
    },
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_way_to_train_is_the_same(tmp_path, run):
    assert_same(trained(tmp_path / "one", "sequential", **run), trained(tmp_path / "two", "concurrent", **run))


def test_a_window_without_targets_is_the_same(tmp_path):
    rows = token_rows(12)
    for index in (2, 3, 6):
        rows.rows[index]["labels"] = [-100] * len(rows.rows[index]["labels"])
    runs = []
    for runtime in ("sequential", "concurrent"):
        trainer = make_trainer(tmp_path, runtime=runtime, max_steps=-1, num_train_epochs=1, max_grad_norm=0.1)
        trainer.train_dataset = rows
        trainer._get_train_sampler = lambda *args: None
        trainer.train()
        runs.append(trainer)
    assert_same(*runs)
    assert runs[1].windows_without_targets == 1
    assert [entry["grad_norm"] == 0 for entry in logs(runs[1]) if "grad_norm" in entry].count(True) == 1


@pytest.mark.parametrize("first", ["sequential", "concurrent"])
@pytest.mark.parametrize("second", ["sequential", "concurrent"])
def test_a_checkpoint_of_either_runtime_resumes_in_either(tmp_path, first, second):
    run = {
        **{"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2, "rows": 11},
        **{"lr_scheduler_type": "cosine", "config": {"num_chunks": 3, "readout": "adapter"}},
    }
    whole = trained(tmp_path, first, **run)
    assert_same(whole, trained(tmp_path, second, resume=str(tmp_path / "checkpoint-4"), **run))


def test_the_stages_work_at_the_same_time_and_hand_on_early(tmp_path, monkeypatch):
    """Stage 1 begins its second micro-batch before stage 2 ends its first one, each in a thread of its own."""
    met = threading.Barrier(2, timeout=60)
    steps: list[tuple[str, str]] = []
    original = Stage.step

    def step(stage, *args):
        own = (stage.name, threading.current_thread().name)
        steps.append(own)
        is_first = steps.count(own) == 1
        if stage.index == 0 and not is_first:
            met.wait()
        terms = original(stage, *args)
        if stage.is_last and is_first:
            met.wait()
        return terms

    monkeypatch.setattr(Stage, "step", step)
    make_trainer(tmp_path, runtime="concurrent", max_steps=2, logging_steps=2).train()
    assert set(steps) == {("chunk_1", "zerolock chunk_1"), ("chunk_2", "zerolock chunk_2")}
    assert len(steps) == 4


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_entries_wait_than_allowed(tmp_path, depth):
    folder = tmp_path / "trace"
    run = {"gradient_accumulation_steps": 4, "max_steps": 3, "logging_steps": 3}
    trained(tmp_path, "concurrent", in_flight_depth=depth, trace=str(folder), **run)
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    waiting = [event["args"]["entries"] for event in events if event["ph"] == "C"]
    assert 0 < max(waiting) <= depth


def test_losses_are_logged_where_they_belong(tmp_path):
    """Each log has the mean over its own windows, though the loop was ahead of the stages."""
    run = {"max_steps": 6, "gradient_accumulation_steps": 2}
    each = [entry["loss"] for entry in losses(trained(tmp_path, "sequential", logging_steps=1, **run))]
    means = [entry["loss"] for entry in losses(trained(tmp_path, "concurrent", logging_steps=3, **run))]
    assert means == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3], rel=1e-6)


def test_the_progress_bar_counts_what_the_last_stage_has_finished(tmp_path):
    trainer = make_trainer(tmp_path, runtime="concurrent", disable_tqdm=False, max_steps=5, logging_steps=5)
    shown = [c for c in trainer.callback_handler.callbacks if isinstance(c, FinishedWindows)]
    assert len(shown) == 1
    told: list[tuple[int, int]] = []
    original = shown[0]._show
    shown[0]._show = lambda state, finished: (told.append((state.global_step, finished)), original(state, finished))
    trainer.train()
    assert all(0 <= finished <= step for step, finished in told)
    assert told[-1] == (5, 5)


def test_it_is_the_concurrent_runtime_and_it_leaves_no_thread_and_no_gradient(tmp_path):
    before = threading.active_count()
    threads = torch.get_num_threads()
    trainer = trained(tmp_path, "concurrent")
    assert isinstance(trainer._runtime, ConcurrentRuntime)
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads
    assert all(p.grad is None for p in trainer.model.parameters())
    assert "zero_grad" not in vars(trainer.model)


def test_training_twice_is_the_same(tmp_path):
    runs = []
    for runtime in ("sequential", "concurrent"):
        trainer = trained(tmp_path, runtime)
        trainer.train()
        runs.append(trainer)
    assert_same(*runs)
