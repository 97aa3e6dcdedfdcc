"""Which checkpoints a run keeps, which one is the best at its end, and what a save that fails costs: nothing."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_runs import make_trainer, read_json
from transformers import TrainerCallback

from peft_zerolock import checkpoint

EVERY_2 = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def trainer_in(folder: Path, **arguments):
    return make_trainer(folder, config={"readout": "adapter"}, **EVERY_2 | arguments)


# ---- saves that fail during training ----


def break_saving(monkeypatch, nth: int) -> None:
    """The `nth` PeftModel.save_pretrained from now on writes half of its files and fails."""
    calls, save = [], PeftModel.save_pretrained

    def fails(self, folder, *args, **kwargs):
        calls.append(folder)
        save(self, folder, *args, **kwargs)
        if len(calls) == nth:
            weights = Path(folder, "adapter_model.safetensors")
            weights.write_bytes(weights.read_bytes()[:100])
            raise OSError("No space left on device")

    monkeypatch.setattr(PeftModel, "save_pretrained", fails)


def test_a_failed_checkpoint_costs_no_earlier_one(tmp_path, monkeypatch):
    whole = trainer_in(tmp_path / "whole")
    whole.train()
    with monkeypatch.context() as patch:
        break_saving(patch, nth=2)
        with pytest.raises(OSError, match="No space left"):
            trainer_in(tmp_path / "run", save_total_limit=1).train()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    assert checkpoint.fault_of(str(tmp_path / "run" / "checkpoint-2")) is None
    resumed = trainer_in(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(t, whole.model.state_dict()[n]) for n, t in resumed.model.state_dict().items())


def test_a_failed_save_model_costs_no_earlier_adapter(tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, save_strategy="no")
    trainer.save_model()
    earlier = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    trainer.train()
    with monkeypatch.context() as patch:
        break_saving(patch, nth=1)
        with pytest.raises(OSError, match="No space left"):
            trainer.save_model()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == earlier
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").read_bytes() != earlier["adapter_model.safetensors"]


# ---- which ones are kept, and the best one ----


def scores(*values: float):
    """compute_metrics that gives these scores one after the other."""
    left = list(values)
    return lambda _: {"score": left.pop(0)}


def best_model_run(folder: Path, limit: int | None, *values: float):
    trainer = make_trainer(
        folder,
        "bert",
        "SEQ_CLS",
        **{"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1},
        **{"load_best_model_at_end": True, "metric_for_best_model": "score", "save_total_limit": limit},
    )
    trainer.compute_metrics = scores(*values)
    trainer.add_callback(Recorder(folder))
    trainer.train()
    return trainer


class Recorder(TrainerCallback):
    """Which checkpoints there are after each save."""

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, []

    def on_save(self, *args, **kwargs):
        self.seen.append(steps_in(self.folder))


def steps_in(folder: Path) -> set[int]:
    assert all(checkpoint.fault_of(str(path)) is None for path in folder.iterdir())
    return {int(p.name.removeprefix("checkpoint-")) for p in folder.iterdir()}


def test_the_best_model_at_the_end_is_checkpoint_2_head_and_all(tmp_path):
    trainer = best_model_run(tmp_path, None, 0.1, 0.9, 0.3, 0.2)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert trainer.state.best_metric == 0.9
    trained = {
        n.replace(".default", "").replace(".modules_to_save", ""): p
        for n, p in trainer.model.named_parameters()
        if p.requires_grad
    }
    for step in (1, 2, 3, 4):
        saved = load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors")
        assert saved.keys() == trained.keys()
        equal = {name for name in saved if torch.equal(saved[name], trained[name])}
        assert equal == (set(saved) if step == 2 else set())
    assert any("classifier" in name for name in trained)
    trainer.save_model(str(tmp_path / "final"))
    final = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert all(torch.equal(final[name], trained[name]) for name in trained)


@pytest.mark.parametrize(
    ("limit", "kept", "left"),
    [
        (1, [{1}, {2}, {2, 3}, {2, 4}], {2}),  # when it ends, Trainer keeps the best alone
        (2, [{1}, {1, 2}, {2, 3}, {2, 4}], {2, 4}),
        (3, [{1}, {1, 2}, {1, 2, 3}, {2, 3, 4}], {2, 3, 4}),
    ],
)
def test_a_limit_keeps_the_newest_and_the_best(tmp_path, limit, kept, left):
    trainer = best_model_run(tmp_path, limit, 0.1, 0.9, 0.3, 0.2)
    assert trainer.callback_handler.callbacks[-1].seen == kept
    assert steps_in(tmp_path) == left
    for step in left:
        state = read_json(tmp_path / f"checkpoint-{step}" / "trainer_state.json")
        assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
        assert state["best_global_step"] == 2


def test_a_limit_alone_keeps_the_newest(tmp_path):
    trainer_in(tmp_path, save_steps=1, save_total_limit=2).train()
    assert steps_in(tmp_path) == {3, 4}
