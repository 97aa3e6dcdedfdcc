"""Checkpoints are complete or do not count: every file of one is damaged in turn, and saves are made to fail."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import make_trainer, read_json, snapshot

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
    for i in range(0, len(content), 3):
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
