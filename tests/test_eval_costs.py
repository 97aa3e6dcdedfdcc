"""The memory and throughput experiments: their files, what they measure on tiny models, and their tables."""

import importlib.util
import json
from pathlib import Path

import measure
import pytest
import torch
import yaml
from tables import at_batch, load_results, memory_table, memory_tables, speeds, targets, throughput_tables

TINY = {
    "title": "Tiny",
    "tensors": "fake",
    "model": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "vocab_size": 64,
    },
    "dtype": "float32",
    "lora": {"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "batch": {"rows": 2, "length": 32, "supervised": 0.125},
    "methods": {
        "bp": {"label": "BP", "trainer": "bp"},
        "bp_checkpointing": {"label": "BP, checkpointing", "trainer": "bp", "checkpointing": True},
        "zerolock_3": {"label": "3 chunks", "trainer": "zerolock", "zerolock": {"num_chunks": 3}},
    },
    "points": [{}, {"rows": 4, "methods": ["bp", "zerolock_3"]}],
}


def _write(tmp_path, kind, spec, name="tiny"):
    path = tmp_path / kind / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


def test_shipped_experiments_can_be_read_and_have_their_references():
    known = measure.experiments()
    assert {"tinyllama", "llama_8b", "qwen_05b", "smollm2", "smollm2_real", "smollm2_answers", "minilm"} <= set(known)
    for path in known.values():
        spec = measure.load(path)
        assert {"bp", "bp_checkpointing", "zerolock_3"} <= set(spec["methods"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"points": [{"methods": ["zerolock_9"]}]}, "zerolock_9"),
        ({"tensors": "imagined"}, "'real' or 'fake'"),
        ({"speed": 1}, "must have exactly"),
        ({"points": [{}], "methods": {"bp": {"trainer": "bp", "zerolock": {"num_chunks": 0}}}}, "num_chunks"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        measure.load(_write(tmp_path, "memory", TINY | change))


def test_memory_result_and_its_tables(tmp_path):
    failing = TINY["methods"] | {"zerolock_7": {"label": "7", "trainer": "zerolock", "zerolock": {"num_chunks": 7}}}
    path = _write(tmp_path, "memory", TINY | {"methods": failing}, "tinyllama")
    result = measure.run(path, tmp_path / "results")
    assert json.loads((tmp_path / "results/memory/tinyllama.json").read_text(encoding="utf-8")) == result
    rows = at_batch(result)
    assert list(rows) == ["bp", "bp_checkpointing", "zerolock_3"]
    assert all(row["peak"] == sum(row["at_peak"].values()) for row in rows.values())
    assert rows["zerolock_3"]["activation_peak"] < 0.6 * rows["bp"]["activation_peak"]
    (failed,) = [row for row in result["rows"] if row["status"] == "failed"]
    assert failed["method"] == "zerolock_7" and "Traceback" in failed["traceback"]
    four_rows = next(row for row in result["rows"] if row["method"] == "bp" and row["rows"] == 4)
    assert 1.8 < four_rows["activation_peak"] / rows["bp"]["activation_peak"] < 2.1
    results = load_results(tmp_path / "results" / "memory")
    share = f"{rows['zerolock_3']['activation_peak'] / rows['bp']['activation_peak']:.2f}"
    assert f"| {share} |" in memory_table(result).splitlines()[-1]
    assert "4 x 32" in memory_tables(results) and "zerolock_7" in memory_tables(results)
    assert "whole peak | at most 0.77 |" in targets(results, [])


def test_throughput_compares_within_a_round(tmp_path):
    spec = {key: value for key, value in TINY.items() if key not in ("points", "tensors")} | {"rounds": 3}
    result = measure.run(_write(tmp_path, "throughput", spec), tmp_path / "results")
    assert [len(row["cpu_seconds"]) for row in result["rows"]] == [3, 3, 3]
    assert all(seconds > 0 for row in result["rows"] for seconds in row["cpu_seconds"])
    for row, seconds in zip(result["rows"], ([2.0, 4.0, 2.0], [4.0, 4.0, 4.0], [2.5, 4.0, 8.0]), strict=True):
        row["cpu_seconds"] = seconds
    assert speeds(result, "bp", "zerolock_3") == [0.8, 1.0, 0.25]
    text = throughput_tables([result])
    assert "| 3 chunks | 0.80 (0.25 - 1.00) | 1.00 (0.50 - 1.60) | 16 |" in text


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_smaller_micro_batches_are_the_same_step(task):
    """Uneven ones too; the gradients are those of the whole batch."""
    spec = TINY | {"lora": TINY["lora"] | {"task_type": task}, "model": TINY["model"] | {"pad_token_id": 0}}
    batch = measure.make_batch(spec, 64, {"rows": 5})
    stepped = []
    for micro_batches in (1, 2):
        torch.manual_seed(0)
        base = measure.base_maker(spec)
        setup = measure.Setup(base, spec["lora"], {"trainer": "bp", "micro_batches": micro_batches})
        before = [p.detach().clone() for p in setup.adapters]
        setup.optimizer = torch.optim.SGD(setup.adapters, lr=1.0)
        setup.step(batch)
        stepped.append([p.detach() - start for p, start in zip(setup.adapters, before, strict=True)])
    assert any(moved.abs().max() > 1e-4 for moved in stepped[0])
    for one, other in zip(*stepped, strict=True):
        assert torch.allclose(one, other, atol=1e-7)


def test_batches_supervise_the_end_of_each_row():
    batch = measure.make_batch(TINY, 64, {"rows": 3, "length": 16})
    assert batch["input_ids"].shape == (3, 16)
    assert (batch["labels"] != -100).sum(1).tolist() == [2, 2, 2]
    assert torch.equal(batch["labels"][:, -2:], batch["input_ids"][:, -2:])


def test_report_fills_the_markers_of_a_file(tmp_path):
    # By its path: the recipes have a module `report` too.
    path = Path(measure.__file__).with_name("report.py")
    spec = importlib.util.spec_from_file_location("costs_report", path)
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    with pytest.raises(ValueError, match="no results"):
        report.sections(tmp_path)
    text = "a\n<!-- report:begin -->\nkept\n<!-- report:end -->\n<!-- memory:begin -->\nold\n<!-- memory:end -->\nb\n"
    assert report.fill(text, {"memory": "new"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="has no section"):
        report.fill(text, {"throughput": "new"})
    with pytest.raises(ValueError, match="once each"):
        report.fill(text.replace("<!-- memory:end -->", ""), {"memory": "new"})
    with pytest.raises(ValueError, match="no marker"):
        report.fill("text", {"memory": "new"})
