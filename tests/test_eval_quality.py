"""The quality suite: its YAML file, its queue, its report, and single training steps on tiny random models."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EVAL = Path(__file__).resolve().parents[1] / "eval"
sys.path.append(str(EVAL / "quality"))

import run  # noqa: E402
import run_queue  # noqa: E402
import specs  # noqa: E402
import tasks  # noqa: E402

# By its path: the recipes have a module `report` too.
_report_spec = importlib.util.spec_from_file_location("eval_report", EVAL / "report.py")
report = importlib.util.module_from_spec(_report_spec)
_report_spec.loader.exec_module(report)

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "Topic", ":", "World", "Sports", "Business", "Technology"]


@pytest.fixture
def experiments():
    return copy.deepcopy(specs.load_experiments()[0])


@pytest.fixture
def tiny(tmp_path, experiments):
    """The shipped experiments on 2-block models and 12 invented rows; returns (experiments, data root)."""
    data = tmp_path / "data"
    lines = [{"text": "good film" if label % 2 else "bad bad film", "label": label} for label in [0, 1, 2, 3] * 3]
    for name, column, classes in (("sst2", "sentence", 2), ("ag_news", "text", 4)):
        (data / name).mkdir(parents=True)
        rows = [json.dumps({column: line["text"], "label": line["label"] % classes}) for line in lines]
        for split in ("train", "validation", "test"):
            (data / name / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    size = {"vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    torch.manual_seed(0)
    models_by_name = {
        "sst2_minilm": BertModel(BertConfig(num_hidden_layers=2, max_position_embeddings=16, **size)),
        "agnews_smollm2": LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, pad_token_id=0, **size)),
    }
    for name, model in models_by_name.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        spec = experiments[name]
        spec["model"] = {"path": str(tmp_path / name)}
        spec["data"] |= {"train_size": 4, "test_size": None}
        spec["training"] |= {"num_train_epochs": 1, "per_device_train_batch_size": 4, "logging_steps": 1}
        spec["methods"]["last_of_2"]["lora"] = {"layers_to_transform": [1]}
    return experiments, data


def test_shipped_experiments_name_the_controls_correctly():
    experiments, rows = specs.load_experiments()
    blocks = {"sst2_minilm": 6, "agnews_smollm2": 30}
    seeds = {"sst2_minilm": 3, "agnews_smollm2": 1}
    assert set(experiments) == set(blocks)
    for name, spec in experiments.items():
        assert spec["methods"]["bp"].get("lora") is None
        for chunks in (2, 3):
            control = spec["methods"][f"last_of_{chunks}"]["lora"]["layers_to_transform"]
            assert control == list(range(blocks[name] - blocks[name] // chunks, blocks[name]))
            methods = [m for n, m in spec["methods"].items() if n.startswith(f"zerolock_{chunks}")]
            assert methods and all(m["zerolock"]["num_chunks"] == chunks for m in methods)
        assert {(row.method, row.seed) for row in rows if row.experiment == name} == {
            (method, seed) for method in spec["methods"] for seed in range(seeds[name])
        }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(kind="regression"), "kind is 'regression'"),
        (lambda spec: spec.update(epochs=3), "unknown keys \\['epochs'\\]"),
        (lambda spec: spec["methods"]["bp"].update(trainer="stock"), "trainer is 'stock'"),
        (lambda spec: spec["methods"]["bp"].update(zerolock={}), "belong to trainer: zerolock"),
        (lambda spec: spec["data"].pop("text"), "`data` needs exactly"),
    ],
)
def test_faulty_experiments_are_refused(tmp_path, experiments, change, message):
    change(experiments["sst2_minilm"])
    path = tmp_path / "experiments.yaml"
    path.write_text(json.dumps({"experiments": experiments, "order": []}), encoding="utf-8")  # JSON is YAML
    with pytest.raises(ValueError, match=message):
        specs.load_experiments(path)


@pytest.mark.parametrize(
    ("experiment", "method"),
    [
        *[("sst2_minilm", method) for method in ("bp", "last_of_2", "zerolock_2")],
        *[("agnews_smollm2", method) for method in ("bp", "last_of_2", "zerolock_2_lm_head")],
    ],
)
def test_one_step_of_every_kind_of_row(tiny, experiment, method):
    experiments, data = tiny
    result = run.run_row(experiments[experiment], specs.Row(experiment, method, 0), data)
    json.dumps(result)
    assert result["train_steps"] == 1
    assert result["test_size"] == len(result["correct"]) == 12
    assert result["accuracy"] == pytest.approx(result["correct"].count("1") / 12)
    assert 0 < result["nll"] < 10
    assert result["log"][0]["loss"] > 0
    if method.startswith("zerolock_2"):
        assert result["zerolock_settings"]["num_chunks"] == 2
        assert {"loss/chunk_1", "loss/chunk_2"} <= set(result["log"][0])


def test_answer_token_batches_give_the_stock_loss(tiny):
    experiments, data = tiny
    task = tasks.make_task(experiments["agnews_smollm2"], data)
    model = task.load_model().eval()
    rows = list(task.train_dataset())
    plain, short = (task.collator(trainer)(rows) for trainer in ("zerolock", "bp"))
    assert set(plain) == {"input_ids", "attention_mask", "labels"}
    assert (plain["labels"] != -100).sum() == len(rows)
    for count in (None, 7):
        losses = [model(**batch, num_items_in_batch=count).loss for batch in (plain, short)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)


def test_unsuitable_answers_and_untrained_new_modules_are_refused(tiny):
    experiments, data = tiny
    experiments["agnews_smollm2"]["answers"][0] = " World Sports"
    with pytest.raises(ValueError, match="distinct single tokens"):
        tasks.make_task(experiments["agnews_smollm2"], data)
    experiments["sst2_minilm"]["lora"]["modules_to_save"] = ["pooler"]
    with pytest.raises(ValueError, match="classifier.weight"):
        tasks.make_task(experiments["sst2_minilm"], data).load_model()


def result_of(row: specs.Row, **values) -> dict:
    config = {"title": f"Table of {row.experiment}", "method": {"label": f"label of {row.method}"}}
    config["method"]["trainer"] = "zerolock" if "zerolock" in row.method else "bp"
    numbers = {"train_cpu_seconds": 10.0, "test_size": 500, "train_tokens": 1000}
    numbers |= {"package_sha256": f"code {row.seed}", "git_commit": f"{row.seed}234567890"}
    return {
        "experiment": row.experiment,
        "method": row.method,
        "seed": row.seed,
        "config": config,
        **numbers,
        **values,
    }


def test_queue_order_waits_skips_and_retries(tmp_path, experiments):
    bp, zerolock = (specs.Row("sst2_minilm", method, 0) for method in ("bp", "zerolock_2"))
    rows = [zerolock, bp]
    assert run_queue.next_row(rows, experiments, tmp_path, ready=False, retry=set()) == bp
    assert run_queue.next_row(rows, experiments, tmp_path, ready=True, retry=set()) == zerolock
    specs.write_result(bp.result_file(tmp_path), result_of(bp, status="failed"))
    assert run_queue.next_row(rows, experiments, tmp_path, ready=False, retry=set()) is None
    assert run_queue.next_row(rows, experiments, tmp_path, ready=False, retry={bp}) == bp
    specs.write_result(zerolock.result_file(tmp_path), result_of(zerolock, status="failed"))
    assert run_queue.next_row(rows, experiments, tmp_path, ready=True, retry=set()) == zerolock  # code changed since
    specs.write_result(zerolock.result_file(tmp_path), result_of(zerolock, status="ok"))
    assert run_queue.next_row(rows, experiments, tmp_path, ready=True, retry=set()) is None


def test_report_of_known_results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_experiments", dict)  # labels as the results have them
    figures = {"bp": [(0.80, 0.50), (0.82, 0.48), (0.84, 0.46)], "zerolock_2": [(0.79, 0.52), (0.81, 0.50)]}
    for method, seeds in figures.items():
        for seed, (accuracy, nll) in enumerate(seeds):
            row = specs.Row("sst2_minilm", method, seed)
            specs.write_result(row.result_file(tmp_path), result_of(row, status="ok", accuracy=accuracy, nll=nll))
    row = specs.Row("sst2_minilm", "zerolock_2", 2)
    specs.write_result(row.result_file(tmp_path), result_of(row, status="failed", error="ValueError('no\nway')"))
    text = report.quality_tables(report.load_results(tmp_path))
    # 95 % interval of 0.80, 0.82, 0.84: 4.303 * 0.02 / sqrt(3)
    assert "| label of bp | 0, 1, 2 | 0.820 ± 0.050 | 0.480 ± 0.050 | - | - | 10 |" in text
    assert (
        "| label of zerolock_2 | 0, 1 | 0.800 ± 0.127 | 0.510 ± 0.127 | -0.010 ± 0.000 | +0.020 ± 0.000 | 10 |" in text
    )
    assert "* `zerolock_2`, seed 2: ValueError('no" in text
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.replace_report(page, text) == f"before\n{report.BEGIN}\n{text}\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="needs one line"):
        report.replace_report("no markers", text)


def test_report_without_results_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="run_queue.py"):
        report.load_results(tmp_path)
