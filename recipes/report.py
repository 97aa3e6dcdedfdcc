"""The end of every run: a summary (table and ``summary.json``), a plot of the losses, and the push to the Hub."""

import json
import logging
import math
import platform
import re
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_zerolock.hub import explain_failed_push

SUMMARY_NAME = "summary.json"
PLOT_NAME = "losses.png"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")
NOT_METRICS = ("runtime", "per_second", "epoch", "num_input_tokens_seen", "preparation_time")


def show_log(args: TrainingArguments, script: str) -> None:
    """Show the recipes' own notes in the terminal, of the main process only, and of other libraries the warnings."""
    logging.basicConfig(format="%(name)s: %(message)s")
    for name in (script, "data", "method"):
        logging.getLogger(name).setLevel(logging.INFO if args.should_log else logging.ERROR)


class RunMonitor(TrainerCallback):
    """Times the optimizer steps (no evaluation, saving or data loading) and starts the count of peak memory.

    A run with fewer steps than ``logging_steps`` logs about ten times instead of never, so that every run has a plot.

    Args:
        args: the run's arguments; counting of input tokens (without padding) is switched on in them.

    Attributes:
        seconds: time spent in optimizer steps, forward passes included.
        tokens: input tokens of these steps, over all processes.
    """

    def __init__(self, args: TrainingArguments):
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "non_padding"
        self.seconds = 0.0
        self.tokens = 0
        self._start = 0.0
        self._tokens_before = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Forget what happened before training, such as a resumed run's tokens; see that a short run logs too."""
        if state.logging_steps > state.max_steps > 0:
            state.logging_steps = max(1, state.max_steps // 10)
        self.seconds, self.tokens, self._tokens_before = 0.0, 0, state.num_input_tokens_seen
        if torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)

    def on_step_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self._start = _now()

    def on_step_end(self, args, state, control, **kwargs):
        """Stop the clock."""
        self.seconds += _now() - self._start
        self.tokens = state.num_input_tokens_seen - self._tokens_before


def peak_memory() -> tuple[float, str]:
    """Peak memory in MiB, and what was measured: allocated by torch on the fullest CUDA device, or resident memory."""
    if torch.cuda.is_available():
        peaks = [torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())]
        return max(peaks) / 2**20, "allocated by torch on the fullest CUDA device, training and after"
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak / 2**20, "resident memory of the process, loading included"


def metrics_of(output: dict[str, float] | None) -> dict[str, float]:
    """What ``trainer.evaluate()`` returned, without times and speeds."""
    return {name: value for name, value in (output or {}).items() if not name.endswith(NOT_METRICS)}


def loss_curves(log_history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Curves of ``(step, loss)`` in Trainer's log: "train", "chunk 1" ..., "eval" (or "eval matched" ...)."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in log_history:
        for key, value in entry.items():
            if key == "loss":
                name = "train"
            elif chunk := re.fullmatch(r"loss/chunk_(\d+)", key):
                name = f"chunk {chunk[1]}"
            elif evaluation := re.fullmatch(r"eval_(?:(.+)_)?loss", key):
                name = f"eval {evaluation[1]}" if evaluation[1] else "eval"
            else:
                continue
            curves.setdefault(name, []).append((entry["step"], float(value)))
    return curves


def plot_losses(log_history: list[dict[str, Any]], path: Path) -> bool:
    """Draw the loss curves as a PNG; returns whether there was anything to draw."""
    curves = loss_curves(log_history)
    if not curves:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in sorted(curves, key=lambda name: (not name.startswith("train"), name)):
        steps, losses = zip(*curves[name], strict=True)
        style = {"linestyle": "--" if name.startswith("eval") else "-", "marker": "." if len(steps) < 30 else None}
        wide = {"linewidth": 5, "alpha": 0.3} if name == "train" else {}  # the last chunk's curve lies on it
        axes.plot(steps, losses, **style, **wide, label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def finish(
    trainer: Trainer,
    monitor: RunMonitor,
    before: dict[str, float] | None = None,
    after: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write ``summary.json`` and ``losses.png`` into the output folder and print the summary; first process only.

    Args:
        trainer: after training.
        monitor: the callback of the run.
        before: what ``trainer.evaluate()`` returned before training.
        after: the same, after training.
        extra: further entries of the summary, such as the model's name; keep paths out of it, for it is pushed too.

    Returns:
        The summary.
    """
    memory, memory_of = peak_memory()
    summary = {
        **(extra or {}),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "train_seconds": monitor.seconds,
        "train_tokens": monitor.tokens,
        "tokens_per_second": monitor.tokens / monitor.seconds if monitor.seconds else None,
        "peak_memory_mib": memory,
        "peak_memory_of": memory_of,
        "metrics_before": metrics_of(before),
        "metrics_after": metrics_of(after),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
    if trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(summary), indent=2, allow_nan=False)
        (folder / SUMMARY_NAME).write_text(text + "\n", encoding="utf-8")
        history = [{**(before or {}), "step": 0}, *trainer.state.log_history]
        plotted = plot_losses(history, folder / PLOT_NAME)
        print_summary(summary, folder, plotted)
    return summary


def print_summary(summary: dict[str, Any], folder: Path, plotted: bool, console: Console | None = None) -> None:
    """A table on a terminal, plain lines elsewhere."""
    console = console or Console()
    speed = summary["tokens_per_second"]
    lines = [
        ("adapter", str(folder)),
        ("loss plot", str(folder / PLOT_NAME) if plotted else "none: nothing was logged (see --logging_steps)"),
        ("trained", f"{summary['steps']} steps, {summary['train_tokens']} tokens, {summary['train_seconds']:.1f} s"),
        ("speed", f"{speed:.0f} tokens/s" if speed else "-"),
        ("peak memory", f"{summary['peak_memory_mib']:.0f} MiB ({summary['peak_memory_of']})"),
    ]
    for name, value in summary["metrics_after"].items():
        old = summary["metrics_before"].get(name)
        lines.append((name, f"{value:.4f}" if old is None else f"{old:.4f} -> {value:.4f}"))
    if not console.is_terminal:
        print("\n".join(f"{name}: {value}" for name, value in lines), file=console.file)
        return
    table = Table(title="Summary", show_header=False)
    for name, value in lines:
        table.add_row(name, value)
    console.print(table)


def save_adapter(trainer: Trainer) -> None:
    """Save the adapter and the tokenizer into the output folder, without the push that ``save_model()`` may do."""
    trainer.save_model(trainer.args.output_dir, _internal_call=True)


def push(trainer: Trainer) -> None:
    """Push the output folder to the Hub, after :func:`save_adapter` and :func:`finish`.

    Raises:
        SystemExit: the push failed; the message says where the adapter is and how to push it again.
    """
    args = trainer.args
    name = trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        with explain_failed_push(args.output_dir, name):
            trainer.push_to_hub()
    except RuntimeError as error:
        raise SystemExit(str(error)) from error


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
