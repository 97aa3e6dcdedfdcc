"""Whatever ends a stage reaches the user as it is, ends all others, and leaves the last checkpoint as it was."""

import _thread
import itertools
import signal
import threading
import time

import pytest
import torch
from small_runs import make_trainer, snapshot
from zoo import token_rows

from peft_zerolock import ZeroLockTrainer
from peft_zerolock.checkpoint import fault_of
from peft_zerolock.stage import Stage

RUN = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "logging_steps": 8}
CONFIG = {"num_chunks": 3, "lora_dropout": 0.2}


class Broken(BaseException):
    """Not even an Exception."""


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def fail_in(monkeypatch, name: str, number: int, error: BaseException):
    """The stage's work on its micro-batch of this number raises."""
    original, counts = Stage.step, {}

    def step(stage, *args):
        counts[stage.name] = counts.get(stage.name, 0) + 1
        if stage.name == name and counts[name] == number:
            raise error
        return original(stage, *args)

    monkeypatch.setattr(Stage, "step", step)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), **RUN | {"save_strategy": "no"}, config=CONFIG)
    trainer.train()
    return snapshot(trainer.model)


@pytest.mark.parametrize(
    ("stage", "depth", "error"),
    [
        (1, 1, RuntimeError("a bad micro-batch")),
        (2, 2, torch.OutOfMemoryError("out of memory. Tried to allocate")),
        (3, 1, KeyboardInterrupt()),
        (3, 3, Broken("at once")),
    ],
    ids=["RuntimeError", "OutOfMemoryError", "KeyboardInterrupt", "Broken"],
)
def test_it_reaches_the_user_and_the_checkpoint_holds(tmp_path, monkeypatch, unbroken, stage, depth, error):
    failing = make_trainer(tmp_path, runtime="concurrent", in_flight_depth=depth, config=CONFIG, **RUN)
    with monkeypatch.context() as patch:
        fail_in(patch, f"chunk_{stage}", 6, error)
        with pytest.raises(type(error)) as caught:
            failing.train()
    assert caught.value is error
    assert any(f"chunk_{stage} of 3" in note for note in error.__notes__)
    assert all(p.grad is None for p in failing.model.parameters())
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    last = str(tmp_path / "checkpoint-4")
    assert fault_of(last) is None
    for again in (failing, make_trainer(tmp_path, runtime="concurrent", config=CONFIG, **RUN)):
        again.train(resume_from_checkpoint=last)
        weights = snapshot(again.model)
        assert [name for name in weights if not torch.equal(weights[name], unbroken[name])] == []


def test_an_interrupt_of_the_user_stops_all(tmp_path, monkeypatch):
    """While the loop waits for the stages, which are far from done."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    trainer = make_trainer(tmp_path, runtime="concurrent", max_steps=1000, logging_steps=1000)
    original, numbers, steps = Stage.step, itertools.count(1), []

    def step(stage, *args):
        number = next(numbers)  # no other call has it, whatever the other stage does meanwhile
        steps.append(number)
        time.sleep(0.01)
        if number == 10:
            _thread.interrupt_main()
        return original(stage, *args)

    monkeypatch.setattr(Stage, "step", step)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(steps) < 30


def test_a_token_that_the_model_does_not_know(tmp_path):
    rows = token_rows(16)
    rows.rows[5]["input_ids"][1] = 999
    trainer = make_trainer(tmp_path, runtime="concurrent", **RUN)
    trainer.train_dataset = rows
    with pytest.raises(IndexError) as caught:
        trainer.train()
    assert any("chunk_1 of 2, on cpu" in note for note in caught.value.__notes__)


def test_a_loss_of_the_user_s_that_fails(tmp_path):
    class Own(ZeroLockTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            if self.state.global_step > 1:
                raise ArithmeticError("not this one")
            return super().compute_loss(model, inputs, **kwargs)

    trainer = make_trainer(tmp_path, runtime="concurrent", **RUN)
    trainer.__class__ = Own
    with pytest.raises(ArithmeticError, match="not this one"):
        trainer.train()


def test_an_optimizer_that_fails(tmp_path):
    trainer = make_trainer(tmp_path, runtime="concurrent", **RUN)
    parts = trainer.create_optimizer().parts

    def step(closure=None):
        raise FloatingPointError("too large")

    parts["chunk_2"].step = step
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    assert any("chunk_2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("where", ["collate", "callback"])
def test_what_fails_outside_the_stages_ends_them_too(tmp_path, where):
    trainer = make_trainer(tmp_path, runtime="concurrent", **RUN)
    counts = []

    def fail(*args, **kwargs):
        counts.append(1)
        if len(counts) == 4:
            raise LookupError("no more")
        return collate(*args) if where == "collate" else step_end(*args, **kwargs)

    collate, step_end = trainer.data_collator, trainer.callback_handler.on_step_end
    if where == "collate":
        trainer.data_collator = fail
    else:
        trainer.callback_handler.on_step_end = fail
    with pytest.raises(LookupError):
        trainer.train()


def test_out_of_memory_finds_a_smaller_batch(tmp_path, monkeypatch):
    """auto_find_batch_size works as in Trainer, because the error arrives as what it is."""
    trainer = make_trainer(
        tmp_path,
        runtime="concurrent",
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        max_steps=3,
    )
    original = Stage.step

    def step(stage, entry, *args):
        if stage.is_last and entry.size > 2:
            raise RuntimeError("CUDA out of memory. (as PyTorch says it)")
        return original(stage, entry, *args)

    monkeypatch.setattr(Stage, "step", step)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer._train_batch_size <= 2
