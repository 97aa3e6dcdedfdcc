"""Two processes by torchrun equal one process on the joined batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_parallel_runs import RUNS, run_all
from peft import PeftModel
from training import largest_difference
from zoo import make_model

from peft_zerolock.checkpoint import fault_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The results of one process, and of two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run_all(one, 1)
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.parent), str(tests.parent / "recipes")]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(tests / "data_parallel_runs.py"), str(two)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=420,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return one, two


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one_on_the_joined_batch(folders, name):
    one, two = (torch.load(folder / f"{name}.pt") for folder in folders)
    assert largest_difference(one["weights"], two["weights"]) < 2e-5
    assert max(w.abs().max() for w in two["weights"].values()) < 1.0  # not the second process's start
    for ours, theirs in zip(one["losses"], two["losses"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[key] - theirs[key]) < 1e-4 for key in ours)


def test_evaluation_early_stopping_saving_and_resuming(folders):
    saved = folders[1] / "saved"
    assert json.loads((folders[1] / "saved.json").read_text()) == {"steps": 6, "resumed": 8}
    checkpoints = sorted(path.name for path in saved.glob("checkpoint-*"))
    assert "checkpoint-6" in checkpoints
    assert all(fault_of(str(saved / name)) is None for name in checkpoints)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in (saved / "checkpoint-6").iterdir()}
    assert not list(saved.glob("_*"))
    loaded = PeftModel.from_pretrained(make_model("llama"), str(saved))
    moved = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(moved) == 6 and all(p.abs().sum() > 0 for p in moved)
