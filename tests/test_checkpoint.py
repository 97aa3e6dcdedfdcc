"""Checkpoints are complete or do not count: every file of one is damaged in turn, and saves are made to fail."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_runs import make_trainer, read_json, snapshot
from transformers import TrainerCallback

from peft_zerolock import checkpoint

EVERY_2 = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
FILES = [
    *("adapter_config.json", "adapter_model.safetensors", "zerolock_config.json", "README.md", "training_args.bin"),
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "readouts.safetensors"),
]
MARKER = "zerolock_complete.json"


def delete(path: Path) -> None:
    path.unlink()


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def trainer_in(folder: Path, **arguments):
    return make_trainer(folder, config={"readout": "adapter"}, **EVERY_2 | arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with checkpoint-2 and checkpoint-4. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("finished")
    trainer_in(folder).train()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_checkpoint_has_these_files_and_a_marker_for_each(finished):
    assert sorted(p.name for p in finished.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        folder = finished / f"checkpoint-{step}"
        assert sorted(p.name for p in folder.iterdir()) == sorted([*FILES, MARKER])
        assert sorted(read_json(folder / MARKER)["files"]) == sorted(FILES)
        assert checkpoint.fault_of(str(folder)) is None
    assert checkpoint.newest_complete(str(finished)) == str(finished / "checkpoint-4")


@pytest.mark.parametrize("damage", [delete, halve, empty, flip])
@pytest.mark.parametrize("name", [*FILES, MARKER])
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_path(run, caplog, name, damage):
    damage(run / "checkpoint-4" / name)
    trainer = trainer_in(run)
    before = snapshot(trainer.model)
    with pytest.raises(ValueError, match=f"not a complete checkpoint: .*{name}.*resume_from_checkpoint=True"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert all(torch.equal(t, before[n]) for n, t in trainer.model.state_dict().items())
    assert caplog.text == ""
    assert checkpoint.newest_complete(str(run)) == str(run / "checkpoint-2")
    assert "checkpoint-2, the newest complete checkpoint" in caplog.text
    assert "checkpoint-4" in caplog.text
    assert name in caplog.text


@pytest.mark.parametrize(("name", "damage"), [("optimizer.pt", delete), ("rng_state.pth", delete), (MARKER, halve)])
def test_training_goes_on_from_the_older_checkpoint(finished, run, caplog, name, damage):
    damage(run / "checkpoint-4" / name)
    trainer = trainer_in(run)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2, the newest complete checkpoint" in caplog.text
    assert checkpoint.fault_of(str(run / "checkpoint-4")) is None  # written again
    for file in ("adapter_model.safetensors", "readouts.safetensors"):
        first, again = (load_file(folder / "checkpoint-4" / file) for folder in (finished, run))
        assert first.keys() == again.keys()
        assert all(torch.equal(first[key], again[key]) for key in first)


def test_a_flipped_byte_anywhere_in_the_marker_is_noticed(run):
    marker = run / "checkpoint-4" / MARKER
    content = marker.read_bytes()
    for i in range(len(content)):
        marker.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        assert checkpoint.fault_of(str(marker.parent)) is not None, f"byte {i}"


def test_without_a_complete_checkpoint_it_says_why_each_is_passed_over(run):
    delete(run / "checkpoint-2" / "scheduler.pt")
    empty(run / "checkpoint-4" / "optimizer.pt")
    with pytest.raises(ValueError) as raised:
        trainer_in(run).train(resume_from_checkpoint=True)
    told = str(raised.value)
    assert "no complete checkpoint" in told
    assert "checkpoint-4: optimizer.pt has 0 bytes" in told
    assert "checkpoint-2: scheduler.pt is missing" in told
    assert "without resume_from_checkpoint" in told.replace("\n", " ")


@pytest.mark.parametrize("made", [True, False], ids=["empty folder", "no folder"])
def test_nothing_to_resume_from_is_an_error(tmp_path, made):
    folder = tmp_path / "run"
    trainer = trainer_in(folder)
    if made:
        folder.mkdir(exist_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_the_newest_is_the_highest_step_not_the_latest_by_name_or_time(run):
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-10")
    os.utime(run / "checkpoint-10", (0, 0))
    (run / "checkpoint-99.bak").mkdir()
    (run / "checkpoint-best").mkdir()
    (run / "checkpoint-100").write_text("a file")
    assert checkpoint.newest_complete(str(run)) == str(run / "checkpoint-10")


# ---- atomic writing ----


def fill(folder: str, content: str) -> None:
    """What stands for a checkpoint where the content does not matter."""
    Path(folder).mkdir()
    for name in FILES:
        Path(folder, name).write_text(content)


def content_of(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in FILES}


def test_staged_writes_a_complete_folder_and_nothing_else(tmp_path):
    with checkpoint.staged(str(tmp_path), "checkpoint-1") as temporary:
        fill(f"{temporary}/checkpoint-1", "new")
        assert not (tmp_path / "checkpoint-1").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert content_of(tmp_path / "checkpoint-1") == {"new"}
    assert checkpoint.fault_of(str(tmp_path / "checkpoint-1")) is None


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_exception_while_writing_leaves_what_was_there(tmp_path, error):
    with checkpoint.staged(str(tmp_path), "checkpoint-1") as temporary:
        fill(f"{temporary}/checkpoint-1", "old")
    with pytest.raises(error):
        with checkpoint.staged(str(tmp_path), "checkpoint-1") as temporary:
            fill(f"{temporary}/checkpoint-1", "new")
            raise error
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert content_of(tmp_path / "checkpoint-1") == {"old"}
    assert checkpoint.fault_of(str(tmp_path / "checkpoint-1")) is None


def test_an_error_between_the_two_renames_leaves_a_complete_folder(tmp_path, monkeypatch):
    with checkpoint.staged(str(tmp_path), "checkpoint-1") as temporary:
        fill(f"{temporary}/checkpoint-1", "old")
    calls, rename = [], os.replace

    def fails_once(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError("no space left")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fails_once)
    with pytest.raises(OSError, match="no space"):
        with checkpoint.staged(str(tmp_path), "checkpoint-1") as temporary:
            fill(f"{temporary}/checkpoint-1", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert content_of(tmp_path / "checkpoint-1") == {"new"}
    assert checkpoint.fault_of(str(tmp_path / "checkpoint-1")) is None


def killed_while(run: Path, moment: str) -> None:
    """Lays out a run folder as a process leaves it that is killed at this moment of writing checkpoint-4 again."""
    temporary = run / "_checkpoint-4.incomplete"
    shutil.copytree(run / "checkpoint-4", temporary / "checkpoint-4")
    if moment == "writing":
        delete(temporary / "checkpoint-4" / MARKER)
        halve(temporary / "checkpoint-4" / "optimizer.pt")
        shutil.rmtree(run / "checkpoint-4")
    elif moment == "renaming":
        os.replace(run / "checkpoint-4", temporary / "replaced")
    elif moment == "renamed":
        os.replace(temporary / "checkpoint-4", temporary / "replaced")


@pytest.mark.parametrize(("moment", "step"), [("writing", 2), ("renaming", 4), ("renamed", 4)])
def test_what_a_killed_save_leaves_is_cleared_up_when_resuming(run, moment, step):
    killed_while(run, moment)
    assert checkpoint.newest_complete(str(run)) == str(run / f"checkpoint-{step}")
    assert {p.name for p in run.iterdir()} == {"checkpoint-2"} | ({"checkpoint-4"} if step == 4 else set())


def test_what_a_killed_save_leaves_is_cleared_up_by_the_next_save(run):
    killed_while(run, "writing")
    (run / "_saving").mkdir()
    (run / "_saving" / "adapter_model.safetensors").write_text("half")
    trainer = trainer_in(run, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    folders = {p.name for p in run.iterdir() if p.is_dir()}
    assert folders == {"checkpoint-1", "checkpoint-2"}
    assert load_file(run / "adapter_model.safetensors").keys()


def test_replaced_files_replaces_what_was_written_and_keeps_the_rest(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "weights").write_text("old")
    with checkpoint.replaced_files(str(tmp_path)) as temporary:
        assert Path(temporary, "README.md").read_text() == "card"  # PEFT updates an existing card
        Path(temporary, "weights").write_text("new")
        Path(temporary, "inner").mkdir()
        Path(temporary, "inner", "weights").write_text("inner")
        assert (tmp_path / "weights").read_text() == "old"
    written = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {"notes.txt": "mine", "README.md": "card", "weights": "new", "inner/weights": "inner"}
    assert not (tmp_path / "_saving").exists()


def test_replaced_files_changes_nothing_on_an_error(tmp_path):
    (tmp_path / "weights").write_text("old")
    with pytest.raises(OSError, match="disk"):
        with checkpoint.replaced_files(str(tmp_path)) as temporary:
            Path(temporary, "weights").write_text("half")
            raise OSError("disk")
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]
    assert (tmp_path / "weights").read_text() == "old"


# ---- saves that fail during training ----


def break_saving(monkeypatch, nth: int) -> None:
    """The `nth` PeftModel.save_pretrained from now on writes half of its files and fails."""
    calls, save = [], PeftModel.save_pretrained

    def fails(self, folder, *args, **kwargs):
        calls.append(folder)
        save(self, folder, *args, **kwargs)
        if len(calls) == nth:
            halve(Path(folder, "adapter_model.safetensors"))
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
