"""The command `zerolock`."""

import json

import pytest
from tiny_text import tiny_llama
from zoo import make_model

from peft_zerolock import ZeroLockConfig
from peft_zerolock.cli import main
from peft_zerolock.planning import Plan, plan

SMALL = ["--target-modules", "q_proj", "v_proj", "--batch", "2", "--seq", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama(blocks=4).save_pretrained(path)
    return path


def test_json_is_the_plan_of_the_python_api(folder, capsys):
    given = ["--num-chunks", "2", "4", "--readout", "lm_head", "--readout-rows", "0.5", "--alpha", "0.5", "--json"]
    assert main(["plan", str(folder / "config.json"), *SMALL, *given]) == 0
    found = Plan.from_dict(json.loads(capsys.readouterr().out))
    config = ZeroLockConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], readout="lm_head", readout_rows=0.5, alpha=0.5
    )
    assert found == plan(str(folder / "config.json"), config, num_chunks=[2, 4], batch=2, seq=16)
    assert [row.chunk_sizes for row in found.rows] == [[4], [4], [2, 2], [1, 1, 1, 1]]


def test_only_the_config_is_read_to_plan(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert main(["plan", str(tmp_path), *SMALL, "--num-chunks", "2", "--devices", "gpu:1GiB"]) == 0
    printed = capsys.readouterr().out
    for word in ("LoRA with BP", "checkpointing", "ZeroLock, 2 chunks", "2+2", "largest batch", "Not counted", "yes"):
        assert word in printed


def test_devices_of_their_own_and_measuring(folder, capsys):
    assert main(["plan", str(folder), *SMALL, "--readout", "lm_head", "--devices", "a:1MiB:1", "b:1MiB:4"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line.split("│")[2].strip() for line in lines if "ZeroLock" in line] == ["even", "devices"]
    assert sum("│ b " in line for line in lines) == 2
    assert main(["plan", str(folder), *SMALL, "--num-chunks", "2", "--dtype", "float32", "--measure"]) == 0
    printed = capsys.readouterr().out
    assert "predicted" in printed and "measured" in printed and "allocator" in printed


def test_inspect_says_what_it_found(folder, capsys):
    arguments = ["inspect", str(folder), "--target-modules", "q_proj", "--num-chunks", "3"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["chunks"]) == (4, [[0, 2], [2, 3], [3, 4]])
    assert found["trainable"][0] == 2 * found["trainable"][1] > 0
    assert any("norm" in name for name in found["tail"]) and not any("layers" in name for name in found["tail"])
    assert main(arguments) == 0
    assert "chunk 3: blocks 3 to 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "./missing"], "does not exist"),
        (["plan", "{folder}", *SMALL, "--num-chunks", "9"], "the model has 4 block(s)"),
        (["plan", "{folder}", *SMALL, "--devices", "24GiB"], "name:memory"),
        (["plan", "{folder}", "--batch", "0"], "batch=0"),
        (["plan", "{folder}", *SMALL, "--readout", "magic"], "readout='magic'"),
        (["inspect", "{folder}", "--num-chunks", "2", "3"], "inspect tests one number of chunks"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(arguments, message, folder, capsys):
    assert main([a.format(folder=folder) for a in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and not printed.out


def test_inspect_of_a_classifier_and_of_a_model_that_cannot_be_cut(tmp_path, capsys):
    make_model("bert", "SEQ_CLS").save_pretrained(tmp_path / "bert")
    arguments = ["--task", "SEQ_CLS", "--target-modules", "query", "--json"]
    assert main(["inspect", str(tmp_path / "bert"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "BertForSequenceClassification" and any("classifier" in name for name in found["tail"])
    make_model("opt", layerdrop=0.1).save_pretrained(tmp_path / "opt")
    assert main(["inspect", str(tmp_path / "opt"), "--target-modules", "q_proj"]) == 2
    assert "layerdrop=0.1 drops blocks at random" in capsys.readouterr().err
