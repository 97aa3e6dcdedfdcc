"""The report of a run: curves, plot, summary, tables, and a push that fails."""

import io
import json
from types import SimpleNamespace

import pytest
import report
from report import RunMonitor, finish, loss_curves, metrics_of, peak_memory, plot_losses, print_summary, push
from rich.console import Console
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

LOG = [
    {"loss": 0.9, "loss/chunk_1": 1.0, "loss/chunk_2": 0.9, "step": 1, "learning_rate": 0.1},
    {"eval_loss": 0.8, "eval_accuracy": 0.5, "eval_matched_loss": 0.7, "step": 1},
    {"loss": 0.6, "loss/chunk_1": 0.7, "loss/chunk_2": 0.6, "consistency/chunk_2": 0.1, "step": 2},
    {"train_loss": 0.7, "train_runtime": 1.0, "step": 2},
]


class Rows(Dataset):
    """Four rows of 3, 4, 5 and 6 tokens, padded to 6."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        mask = [1] * (3 + index) + [0] * (3 - index)
        return {"input_ids": [5] * 6, "attention_mask": mask, "labels": index % 2}


def trained(folder) -> tuple[Trainer, RunMonitor]:
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    monitor = RunMonitor(args)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[monitor])
    trainer.train()
    return trainer, monitor


def test_curves():
    assert loss_curves(LOG) == {
        "train": [(1, 0.9), (2, 0.6)],
        "chunk 1": [(1, 1.0), (2, 0.7)],
        "chunk 2": [(1, 0.9), (2, 0.6)],
        "eval": [(1, 0.8)],
        "eval matched": [(1, 0.7)],
    }


def test_the_plot_has_every_curve(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        report.Figure, "savefig", lambda figure, *args, **kwargs: drawn.extend(figure.axes[0].get_lines())
    )
    assert plot_losses(LOG, tmp_path / "losses.png")
    assert [line.get_label() for line in drawn] == ["train", "chunk 1", "chunk 2", "eval", "eval matched"]
    assert list(drawn[1].get_ydata()) == [1.0, 0.7] and [line.get_linestyle() for line in drawn[2:4]] == ["-", "--"]
    assert not plot_losses([{"train_loss": 0.7, "step": 2}], tmp_path / "none.png")


def test_times_and_speeds_are_no_metrics():
    output = {"eval_loss": 0.5, "eval_accuracy": 1.0, "eval_runtime": 3.0, "eval_samples_per_second": 2.0, "epoch": 1}
    assert metrics_of(output) == {"eval_loss": 0.5, "eval_accuracy": 1.0}
    assert metrics_of(None) == {}


def test_a_run_is_summarised(tmp_path, capsys):
    trainer, monitor = trained(tmp_path / "out")
    assert monitor.tokens == 2 * (3 + 4 + 5 + 6)  # four steps of two rows: every row twice, padding not counted
    assert monitor.seconds > 0
    finish(trainer, monitor, {"eval_loss": float("nan")}, {"eval_loss": 0.25, "eval_runtime": 1.0}, {"model": "tiny"})
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (saved["model"], saved["steps"], saved["epochs"], saved["train_tokens"]) == ("tiny", 4, 2.0, 36)
    assert saved["tokens_per_second"] == pytest.approx(36 / saved["train_seconds"])
    assert (saved["metrics_before"], saved["metrics_after"]) == ({"eval_loss": None}, {"eval_loss": 0.25})
    assert saved["peak_memory_mib"] > 50 and str(tmp_path) not in json.dumps(saved)
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG\r\n")
    printed = capsys.readouterr().out
    assert f"adapter: {tmp_path / 'out'}\n" in printed and "trained: 4 steps, 36 tokens, " in printed
    assert "eval_loss: nan -> 0.2500" in printed


def test_tokens_and_seconds_of_a_resumed_run_are_its_own():
    args = TrainingArguments("unused", use_cpu=True)
    monitor, state = RunMonitor(args), TrainerState(num_input_tokens_seen=100)
    assert args.include_num_input_tokens_seen == "non_padding"
    monitor.on_train_begin(args, state, TrainerControl())
    monitor.on_step_begin(args, state, TrainerControl())
    state.num_input_tokens_seen = 130
    monitor.on_step_end(args, state, TrainerControl())
    assert monitor.tokens == 30


@pytest.mark.parametrize(("steps", "every", "used"), [(4, 500, 1), (200, 500, 20), (4, 2, 2), (500, 500, 500)])
def test_a_run_shorter_than_logging_steps_logs_all_the_same(steps, every, used):
    args = TrainingArguments("unused", use_cpu=True)
    state = TrainerState(max_steps=steps, logging_steps=every)
    RunMonitor(args).on_train_begin(args, state, TrainerControl())
    assert state.logging_steps == used


def test_peak_memory_counts_what_was_allocated():
    before, meaning = peak_memory()
    block = bytearray(b"x") * (int(before) * 2**20 + 64 * 2**20)
    after, _ = peak_memory()
    assert after >= before + 32 and len(block) > 0
    assert meaning == "resident memory of the process, loading included"


def test_a_terminal_gets_a_table(tmp_path):
    summary = {
        "steps": 2,
        "train_tokens": 10,
        "train_seconds": 2.0,
        "tokens_per_second": 5.0,
        "peak_memory_mib": 100.0,
        "peak_memory_of": "x",
        "metrics_before": {"eval_accuracy": 0.5},
        "metrics_after": {"eval_accuracy": 0.75},
    }
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
        print_summary(summary, tmp_path, False, console)
        text = console.file.getvalue()
        assert ("Summary" in text) == ("│" in text) == terminal
        assert "0.5000 -> 0.7500" in text and "5 tokens/s" in text and "none: nothing was logged" in text


def test_a_failed_push_says_where_the_adapter_is_and_how_to_push_again(tmp_path):
    def push_to_hub():
        raise ConnectionError("no route")

    args = SimpleNamespace(output_dir=str(tmp_path / "mine"), hub_model_id="me/mine")
    with pytest.raises(SystemExit) as error:
        push(SimpleNamespace(args=args, hub_model_id="me/mine", push_to_hub=push_to_hub))
    assert "no route" in str(error.value) and str(tmp_path / "mine") in str(error.value)
    assert "hf upload me/mine" in str(error.value)
