"""The GLUE recipe: its rows, its runs with every task and kind of model, and its real command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import glue
import pytest
import torch
from metrics import METRICS
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "the", "was", "not", "very"]
QUIET = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--save_strategy", "no"]


def save_tokenizer(folder: Path, **special: str) -> None:
    """One token a word."""
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", **special).save_pretrained(folder)


def save_model(folder: Path, config, **special: str) -> Path:
    """A random backbone: head (and DeBERTa's pooler) are missing from the checkpoint."""
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    save_tokenizer(folder, **special)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZE)
    return save_model(tmp_path_factory.mktemp("bert"), config, pad_token="[PAD]")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Every task with rows whose label is told by the first word, laid out like the Hub's."""
    folder = tmp_path_factory.mktemp("data")
    for task, (columns, names) in glue.TASKS.items():
        for split in ["train", "validation"] if task != "mnli" else ["train", "validation_matched"]:
            rows = []
            for number in range(24):
                good = number % 2
                texts = [f"{'good' if good else 'bad'} {'very ' * (number % 5)}film", "the film was good"]
                rows.append({**dict(zip(columns, texts, strict=False)), "label": good if names else good * 5.0})
            (folder / task).mkdir(exist_ok=True)
            (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(model: Path | str, data: Path, out: Path, *flags: str) -> dict:
    names = ["--model", str(model), "--dataset", str(data), "--output_dir", str(out), "--max_length", "16"]
    return glue.main([*names, *QUIET, *flags])


def logits_with_plain_peft(model: Path, adapter: Path, seed: int) -> torch.Tensor:
    """Of the saved adapter on a base whose missing modules are initialised from `seed`."""
    torch.manual_seed(seed)
    base = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base.config.pad_token_id = tokenizer.pad_token_id
    batch = tokenizer(["good film", "bad very film"], padding=True, return_tensors="pt")
    with torch.no_grad():
        return PeftModel.from_pretrained(base, adapter).eval()(**batch).logits


# ---- rows ----


def test_labels():
    names = ("entailment", "neutral", "contradiction")
    assert [glue.label_of(value, names) for value in (2, "2", "neutral")] == [2, 2, 1]
    assert glue.label_of(2.5, ()) == 2.5
    with pytest.raises(ValueError, match="label is -1: the row is not labelled"):
        glue.label_of(-1, names)
    with pytest.raises(ValueError, match=r"label is 'maybe', not one of 0 \(entailment\), 1 \(neutral\)"):
        glue.label_of("maybe", names)


def test_long_rows_are_cut_or_dropped_and_counted(bert, data, tmp_path, caplog):
    flags = ["--task", "sst2", "--max_length", "4", "--max_steps", "1", "--no_eval_before"]
    cut = run(bert, data, tmp_path / "cut", *flags)["rows"]
    # [CLS] word very*n film [SEP]: the rows with n > 0 are longer than 4, which are 19 of 24
    assert (cut["train"]["kept"], cut["train"]["too_long"]) == (24, 19)
    assert "cut 19 of 24 rows to 4 tokens" in caplog.text and "train.jsonl:2" in caplog.text
    dropped = run(bert, data, tmp_path / "drop", *flags, "--drop_long_rows")["rows"]
    assert (dropped["train"]["kept"], dropped["validation"]["kept"]) == (5, 24)


def test_damaged_data_stops_the_run_with_the_place(bert, data, tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("sentence,label\ngood film,positive\nbad film,awful\n")
    flags = ["--task", "sst2", "--train_file", str(path), "--validation_file", str(data / "sst2/validation.jsonl")]
    with pytest.raises(SystemExit, match=r"train.csv:3: label is 'awful', not one of 0 \(negative\), 1 \(positive\)"):
        run(bert, data, tmp_path / "out", *flags)
    summary = run(bert, data, tmp_path / "out", *flags, "--skip_bad_rows", "--max_steps", "1")
    assert summary["rows"]["train"] == {"kept": 1, "blank": 0, "bad": 1, "too_long": 0}


def test_a_length_that_the_model_cannot_take_is_refused(bert, data, tmp_path):
    with pytest.raises(SystemExit, match="glue.py: max_length=64, but .* takes 32 tokens at most"):
        run(bert, data, tmp_path / "out", "--task", "sst2", "--max_length", "64")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--num_chunks", "9"], "num_chunks=9: the model has 2"),
        (["--readout", "vocab"], "readout='vocab' replaces a language-model head"),
        (["--modules_to_save", "poolr"], "has no module 'poolr'; it consists of bert, dropout, classifier"),
        (["--model", "absent/"], "model 'absent/' does not exist"),
        (["--model", "absent"], "model 'absent' cannot be loaded: (.|\n)*Correct the name"),
        (["--resume_from_checkpoint", "true"], "has no complete checkpoint"),
    ],
)
def test_a_model_and_settings_that_do_not_fit_are_one_message(bert, data, tmp_path, flags, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=f"^glue.py: (.|\n)*{message}"):
        run(bert, data, tmp_path / "out", "--task", "sst2", "--max_length", "32", *flags)


# ---- runs ----


@pytest.mark.parametrize("task", glue.TASKS)
def test_every_task_runs(bert, data, tmp_path, task):
    flags = ["--task", task, "--max_train_samples", "8", "--max_eval_samples", "6", "--max_steps", "1"]
    summary = run(bert, data, tmp_path / "out", *flags, "--no_eval_before")
    assert set(summary["metrics_after"]) == {"eval_loss", *(f"eval_{name}" for name in METRICS[task])}
    assert [counts["kept"] for counts in summary["rows"].values()] == [8, 6]
    head = load_file(tmp_path / "out" / "adapter_model.safetensors")["base_model.model.classifier.weight"]
    assert head.shape[0] == {"stsb": 1, "mnli": 3}.get(task, 2)


def test_mnli_is_evaluated_matched_and_mismatched(bert, data, tmp_path):
    for split in ("train", "validation_matched", "validation_mismatched"):
        rows = (data / "mnli" / ("train.jsonl" if split == "train" else "validation_matched.jsonl")).read_text()
        (tmp_path / f"{split}.jsonl").write_text(rows)
    summary = run(bert, tmp_path, tmp_path / "out", "--task", "mnli", "--max_steps", "1")
    assert set(summary["metrics_after"]) == {
        f"eval_{split}_{name}" for split in ("matched", "mismatched") for name in ("loss", "accuracy")
    }
    assert list(summary["rows"]) == ["train", "matched", "mismatched"]


def test_one_chunk_equals_backpropagation(bert, data, tmp_path):
    flags = ["--task", "sst2", "--max_steps", "4", "--learning_rate", "0.01", "--lora_dropout", "0.1"]
    run(bert, data, tmp_path / "bp", *flags, "--method", "bp")
    run(bert, data, tmp_path / "one", *flags, "--num_chunks", "1")
    expected, given = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("bp", "one"))
    assert expected.keys() == given.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(given[name], weight, atol=1e-6, rtol=0, msg=name)
    assert max(weight.abs().max() for name, weight in expected.items() if "lora_B" in name) > 1e-3


def test_the_evaluation_before_changes_nothing(bert, data, tmp_path):
    flags = ["--task", "sst2", "--max_steps", "2", "--learning_rate", "0.01", "--lora_dropout", "0.1"]
    for name, flag in (("with", "--eval_before"), ("without", "--no_eval_before")):
        run(bert, data, tmp_path / name, *flags, flag)
    with_it, without = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("with", "without"))
    assert all(torch.equal(with_it[name], without[name]) for name in with_it)


def test_a_run_is_resumed_from_its_last_checkpoint(bert, data, tmp_path):
    flags = ["--task", "sst2", "--no_eval_before", "--per_device_train_batch_size", "4"]
    first = run(bert, data, tmp_path / "out", *flags, "--max_steps", "2", "--save_strategy", "steps")
    resumed = run(bert, data, tmp_path / "out", *flags, "--max_steps", "3", "--resume_from_checkpoint", "last")
    assert (first["steps"], resumed["steps"]) == (2, 3)
    assert 0 < resumed["train_tokens"] < first["train_tokens"]


def test_a_new_pooler_is_trained_and_saved(data, tmp_path):
    config = DebertaV2Config(vocab_size=len(WORDS), max_position_embeddings=32, pooler_hidden_size=16, **SIZE)
    model = save_model(tmp_path / "deberta", config, pad_token="[PAD]")
    run(model, data, tmp_path / "out", "--task", "sst2", "--max_steps", "3", "--learning_rate", "0.01")
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {"base_model.model.pooler.dense.weight", "base_model.model.classifier.weight"} <= saved.keys()
    first, second = (logits_with_plain_peft(model, tmp_path / "out", seed) for seed in (1, 2))
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_a_decoder_without_padding_token_gets_one(data, tmp_path, caplog):
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZE)
    model = save_model(tmp_path / "llama", config, eos_token="[SEP]")
    caplog.set_level("INFO")
    summary = run(model, data, tmp_path / "out", "--task", "mrpc", "--max_steps", "3", "--learning_rate", "0.01")
    assert "the tokenizer has no padding token: its end token '[SEP]' is taken" in caplog.text
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "[SEP]"
    assert summary["metrics_after"]["eval_loss"] < summary["metrics_before"]["eval_loss"]
    first, second = (logits_with_plain_peft(model, tmp_path / "out", seed) for seed in (1, 2))
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_the_command_line_trains_from_a_yaml_file(bert, data, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"task: sst2\nmodel: {bert}\ndataset: {data}\nmax_length: 16\nnum_chunks: 2\nlearning_rate: 1e-4\n"
        "output_dir: out\nper_device_train_batch_size: 8\nlogging_steps: 2\nreport_to: tensorboard\nuse_cpu: true\n"
    )
    command = [sys.executable, str(ROOT / "recipes" / "glue.py"), "run.yaml", "--learning_rate", "0.02"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--num_train_epochs", "8"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["task"], summary["method"], summary["steps"]) == ("sst2", "zerolock", 24)
    assert summary["metrics_after"]["eval_accuracy"] == 1.0
    assert "adapter: out\n" in done.stdout and "-> 1.0000" in done.stdout
    assert (tmp_path / "out" / "losses.png").stat().st_size > 5000
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert logits_with_plain_peft(bert, tmp_path / "out", 5).argmax(-1).tolist() == [1, 0]


@pytest.mark.shared_data
@pytest.mark.minilm
def test_the_shipped_sst2_run_learns_real_rows(tmp_path):
    rows = str(SHARED / "sst2" / "validation.jsonl")
    flags = ["--train_file", rows, "--validation_file", rows, "--max_train_samples", "16", "--max_eval_samples", "16"]
    flags += ["--per_device_train_batch_size", "8", "--max_steps", "4", "--warmup_steps", "0", "--eval_strategy", "no"]
    yaml_file = str(ROOT / "recipes" / "glue_sst2_minilm.yaml")
    summary = glue.main([yaml_file, *flags, "--output_dir", str(tmp_path / "out"), *QUIET])
    assert (summary["model"], summary["steps"]) == ("minilm-l6", 4)
    assert summary["metrics_after"]["eval_loss"] < summary["metrics_before"]["eval_loss"]
