"""The quality suite's tasks and single rows: its YAML file, data and scores, on tiny random models."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EVAL = Path(__file__).resolve().parents[1] / "eval"
sys.path.append(str(EVAL / "quality"))

import answers  # noqa: E402
import run  # noqa: E402
import specs  # noqa: E402
from rows import Row  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "Topic", "Sentiment", "Answer", ":"]
WORDS += ["World", "Sports", "Business", "Technology", "negative", "positive"]
CLASSES = {"ag_news": 4, "gsm8k": 1}


def content() -> dict:
    """The shipped YAML file, read anew."""
    return yaml.safe_load(specs.EXPERIMENTS.read_text(encoding="utf-8"))


def load(folder: Path, changed: dict) -> specs.Suite:
    path = folder / "experiments.yaml"
    path.write_text(json.dumps(changed), encoding="utf-8")  # JSON is YAML
    return specs.load_suite(path)


@pytest.fixture
def tiny(tmp_path):
    """The shipped experiments on 4-block models and 12 invented rows a file; returns (suite, data root)."""
    changed = content()
    sizes = {"vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    torch.manual_seed(0)
    bases = {
        "minilm": BertModel(BertConfig(num_hidden_layers=4, max_position_embeddings=16, **sizes)),
        "smollm2": LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, pad_token_id=0, eos_token_id=0, **sizes)),
    }
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[PAD]"}
    for name, model in bases.items():
        model.save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path / name)
        changed["families"][name]["model"] = {"path": str(tmp_path / name)}
        changed["families"][name]["training"] |= {"per_device_train_batch_size": 4, "logging_steps": 1}
    for spec in changed["experiments"].values():
        spec["data"] |= {"train_size": 4, "tune_size": 3, "test_size": None}
        spec["training"] = {"num_train_epochs": 1, "per_device_train_batch_size": 4}
        write_rows(tmp_path / "data" / spec["data"]["folder"], spec)
    return load(tmp_path, changed), tmp_path / "data"


def write_rows(folder: Path, spec: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = spec["data"]
    names = [data["text"]] if isinstance(data["text"], str) else data["text"]
    for position, name in enumerate([data["train_file"], *data["test_files"]]):
        rows = []
        for index in range(12):
            label = index % 2 if spec["kind"] != "answer_token" else index % len(spec["answers"])
            label = label + 0.25 * index if spec["kind"] == "regression" else label
            text = "good film" if index % 2 else "bad bad film" + " film" * position
            rows.append({**dict.fromkeys(names, text), "answer": "World Sports" * (1 + index % 2), "label": label})
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("section", "name", "change", "message"),
    [
        ("experiments", "cola", {"kind": "ranking"}, "kind is 'ranking'"),
        ("experiments", "cola", {"epochs": 3}, "unknown keys \\['epochs'\\]"),
        ("experiments", "cola", {"family": "bert"}, "family is 'bert'"),
        ("experiments", "cola", {"kind": "answer_loss"}, "needs the keys \\['prompt_end'\\]"),
        ("experiments", "cola", {"data": {"folder": "cola"}}, "data: missing keys"),
        ("methods", "bp", {"trainer": "stock"}, "trainer is 'stock'"),
        ("methods", "bp", {"zerolock": {}}, "belong to trainer: zerolock"),
        ("families", "minilm", {"learning_rates": []}, "numbers above 0"),
        ("families", "minilm", {"tune_on": ["gsm8k"]}, "name at least one experiment of"),
        ("families", "minilm", {"training": {"learning_rate": 1e-3}}, "belongs into learning_rates"),
    ],
)
def test_faulty_entries_are_refused(tmp_path, section, name, change, message):
    changed = content()
    changed[section][name] |= change
    with pytest.raises(ValueError, match=message):
        load(tmp_path, changed)


def test_an_order_of_unknown_methods_and_a_name_that_is_no_file_name_are_refused(tmp_path):
    changed = content()
    changed["order"] = [{"experiments": ["cola"], "methods": ["sgd"], "seeds": [0]}]
    with pytest.raises(ValueError, match="there are no methods \\['sgd'\\]"):
        load(tmp_path, changed)
    changed = content()
    changed["methods"]["a.b"] = changed["methods"]["bp"]
    with pytest.raises(ValueError, match="become file names"):
        load(tmp_path, changed)


def test_every_chunk_count_has_its_control():
    suite = specs.load_suite()
    counts = {m["zerolock"]["num_chunks"] for m in suite.methods.values() if m["trainer"] == "zerolock"}
    controls = [m["zerolock"] for m in suite.methods.values() if "train_chunks" in m.get("zerolock", {})]
    assert counts >= {2, 3, 4}
    for count in counts:
        assert {"num_chunks": count, "train_chunks": [-1]} in controls


@pytest.mark.parametrize(
    ("experiment", "method", "metrics"),
    [
        ("cola", "bp", {"accuracy", "nll", "matthews_correlation"}),
        ("mrpc", "blocks_2", {"accuracy", "nll", "f1"}),
        ("rte", "last_4", {"accuracy", "nll"}),
        ("stsb", "blocks_3", {"mse", "pearson", "spearmanr"}),
        ("sst2_prompt", "bp", {"accuracy", "nll"}),
        ("agnews", "tail_2", {"accuracy", "nll"}),
        ("gsm8k", "bp", {"nll"}),
        ("gsm8k", "blocks_3", {"nll"}),
    ],
)
def test_one_step_of_every_kind_of_row(tiny, experiment, method, metrics):
    suite, data = tiny
    spec = suite.settings(experiment, method)
    result = run.run_row(spec, Row(experiment, method, 0, 1e-3), data)
    json.dumps(result)
    assert result["train_steps"] == 1
    files = spec["data"]["test_files"]
    assert result["test_size"] == 12 * len(files)
    assert list(result["files"]) == files
    assert all(metrics | {"rows"} == set(found) for found in result["files"].values())
    assert metrics <= set(result)
    losses = np.array(result["row_losses"].split(), dtype=float)
    weights = np.array(result["row_tokens"].split(), dtype=float) if experiment == "gsm8k" else np.ones(len(losses))
    assert np.average(losses, weights=weights) == pytest.approx(result.get("nll", result.get("mse")), abs=1e-4)
    if "accuracy" in metrics:
        assert result["accuracy"] == pytest.approx(result["correct"].count("1") / result["test_size"])
    learned = [found["chunk"] for found in result["exits"]]
    chunks = spec["method"].get("zerolock", {}).get("num_chunks", 0)
    assert learned == ([chunks] if method.startswith("last") else list(range(1, chunks + 1)))
    if method == "bp":
        assert result["activation_bytes"] == result["bp_activation_bytes"] > 0
    else:
        assert result["activation_bytes"] > 0
        if not method.startswith("blocks"):  # 2 blocks and 2 of the readout are as many as the model has
            assert result["activation_bytes"] < result["bp_activation_bytes"]
        last = result["exits"][-1]
        name = "nll" if "nll" in metrics else "mse"
        assert last["depth"] == 1 and last[name] == pytest.approx(result[name], rel=1e-5)
        assert result["zerolock_settings"]["num_chunks"] == chunks


def test_measuring_the_activations_changes_nothing(tiny, monkeypatch):
    suite, data = tiny
    spec, row = suite.settings("cola", "blocks_2"), Row("cola", "blocks_2", 0, 1e-2)
    measured = run.run_row(spec, row, data)
    monkeypatch.setattr(run, "_activations", lambda *_: {})
    assert run.run_row(spec, row, data)["row_losses"] == measured["row_losses"]


def test_tuning_rows_are_scored_on_training_rows_that_they_do_not_train_on(tiny):
    suite, data = tiny
    spec = suite.settings("cola", "bp")
    for size, trained in ((4, 4), (None, 9), (12, 9)):
        spec = copy.deepcopy(spec)
        spec["data"]["train_size"] = size
        lines = [{"sentence": "good film", "label": index % 2, "idx": index} for index in range(12)]
        (data / "cola" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
        task, tuning = (answers.make_task(spec, data, tuning=tuning) for tuning in (False, True))
        seen, held_out = ({row["idx"] for row in rows} for rows in (tuning.train_rows, tuning.test_rows))
        assert len(seen) == trained and len(held_out) == 3 and not seen & held_out
        assert list(tuning.files) == ["train.jsonl"] and list(task.files) == ["validation.jsonl"]
    result = run.run_row(spec, Row("cola", "bp", 100, 1e-3, tuning=True), data)
    assert result["test_size"] == 3


def test_too_few_rows_and_an_unknown_metric_are_refused(tiny):
    suite, data = tiny
    for change, message in (({"train_size": 13}, "train_size is 13"), ({"test_size": 13}, "test_size is 13")):
        spec = copy.deepcopy(suite.settings("cola", "bp"))
        spec["data"] |= change
        with pytest.raises(ValueError, match=message):
            answers.make_task(spec, data)
    with pytest.raises(ValueError, match="glue is 'ag'"):
        answers.make_task({**suite.settings("cola", "bp"), "glue": "ag"}, data)


@pytest.mark.parametrize("experiment", ["agnews", "gsm8k"])
def test_answer_batches_give_the_stock_loss_and_the_scored_loss(tiny, experiment):
    suite, data = tiny
    spec = suite.settings(experiment, "bp")
    spec["data"]["train_size"] = 4
    task = answers.make_task(spec, data)
    model = task.load_model().eval()
    rows = list(task.train_dataset())
    plain, short = (task.collator(trainer)(rows) for trainer in ("zerolock", "bp"))
    assert set(plain) == {"input_ids", "attention_mask", "labels"}
    assert (plain["labels"] != -100).sum() == sum(row["answer"] for row in rows)
    for count in (None, 7):
        losses = [model(**batch, num_items_in_batch=count).loss for batch in (plain, short)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    if experiment == "gsm8k":
        task.test_rows = task.train_rows
        scored = task.measure(task.outputs(model), task.test_rows)["nll"]
        assert scored == pytest.approx(model(**plain).loss.item(), rel=1e-5)


def test_long_prompts_leave_room_for_the_answer(tiny):
    suite, data = tiny
    spec = {**suite.settings("gsm8k", "bp"), "max_tokens": 8}
    task = answers.make_task(spec, data)
    prompt, answer = (
        make({"question": "good " * 20, "answer": "bad " * 20}) for make in (task.prompt_ids, task.answer_ids)
    )
    assert prompt == [2, 2, *task.prompt_end] and len(prompt) == 4
    assert answer == [3] * 4
    short = task.answer_ids({"question": "good", "answer": "bad"})
    assert short == [3, task.tokenizer.eos_token_id]


def test_unsuitable_answers_and_untrained_new_modules_are_refused(tiny):
    suite, data = tiny
    spec = suite.settings("agnews", "bp")
    with pytest.raises(ValueError, match="distinct single tokens"):
        answers.make_task({**spec, "answers": [" World Sports", *spec["answers"][1:]]}, data)
    spec = copy.deepcopy(suite.settings("cola", "bp"))
    spec["lora"]["modules_to_save"] = ["pooler"]
    with pytest.raises(ValueError, match="classifier.weight"):
        answers.make_task(spec, data).load_model()
