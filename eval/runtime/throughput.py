"""Tokens per second of two chunks on two cores, concurrent and sequential, beside backpropagation and its pipelines.

    python eval/runtime/throughput.py                        # prints a table, writes results/runtime/throughput.json
    python eval/runtime/throughput.py --readout auto --readout-rows auto --output eval/results/runtime/defaults.json

Each round runs every method once on the same update windows, in an order that turns from round to round; ratios are
taken within a round, and their median over the rounds is what counts, because other work may share the machine. BP is
one chunk in the sequential runtime: the same blocks, the same sliced loss at the same positions, one backward pass.
Threads of OpenMP wait passively (OMP_WAIT_POLICY), else those of the methods with two threads burn what others need.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pipelines import SCHEDULES, Pipelines
from workload import Work, learning, load_stages

from peft_zerolock.optimizer import StagedOptimizer
from peft_zerolock.runtime import ConcurrentRuntime, SequentialRuntime

RESULTS = Path(__file__).resolve().parents[1] / "results" / "runtime"
THREADS = 2


def sequential(work: Work, num_chunks: int) -> Callable[[int], float]:
    """Runs windows in the sequential runtime with all threads."""
    _, stages = load_stages(work, num_chunks)
    runtime = SequentialRuntime(stages, torch.Tensor.backward)
    optimizer = torch.optim.AdamW(learning(stages), lr=1e-4)
    return lambda windows: _seconds(work, runtime, optimizer, windows)


def concurrent(work: Work, num_chunks: int) -> Callable[[int], float]:
    """Runs windows in the concurrent runtime, which shares the threads out among the chunks."""
    _, stages = load_stages(work, num_chunks)
    runtime = ConcurrentRuntime(stages, [torch.device("cpu")] * num_chunks, torch.Tensor.backward, depth=2)
    optimizer = StagedOptimizer(
        torch.optim.AdamW(learning(stages), lr=1e-4), runtime.end_window, lambda: runtime.drain() and None
    )
    runtime.optimizer = optimizer

    return lambda windows: _seconds(work, runtime, optimizer, windows)


def _seconds(
    work: Work, runtime: SequentialRuntime | ConcurrentRuntime, optimizer: torch.optim.Optimizer, windows: int
) -> float:
    torch.set_num_threads(THREADS)
    start = time.perf_counter()
    for window in range(windows):
        runtime.begin_window()
        for entry in work.entries(window):
            runtime.submit(entry, None)
        runtime.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    runtime.drain()
    seconds = time.perf_counter() - start
    runtime.close()
    return seconds


def measure(work: Work, rounds: int, windows: int, port: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Runs all methods in turn; `save` gets the result after every round."""
    pipelines = Pipelines(work, port)
    run: dict[str, Callable[[int], float]] = {
        name: lambda windows, name=name: pipelines.seconds(name, windows) for name in SCHEDULES
    }
    run |= {"bp": sequential(work, 1), "sequential": sequential(work, 2), "concurrent": concurrent(work, 2)}
    for each in run.values():
        each(1)
    transfer = statistics.median(pipelines.seconds("transfer", 20) for _ in range(5))
    seconds: list[dict[str, float]] = []
    names = list(run)
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        seconds.append({name: run[name](windows) for name in order})
        save(
            {
                "work": asdict(work),
                "windows": windows,
                "seconds": seconds,
                "transfer": transfer,
                "load": os.getloadavg()[0],
            }
        )
    pipelines.close()


def ratios(seconds: list[dict[str, float]]) -> dict[str, list[float]]:
    """How many times as fast as each other method the concurrent runtime was, by round."""
    others = [name for name in seconds[0] if name != "concurrent"]
    return {name: [each[name] / each["concurrent"] for each in seconds] for name in others}


def table(result: dict[str, Any]) -> str:
    """Median tokens per second and ratios, with the smallest and the largest ratio."""
    tokens = Work(**result["work"]).tokens * result["windows"]
    lines = ["| method | tokens/s | concurrent is faster by |", "| --- | --- | --- |"]
    found = ratios(result["seconds"])
    for name in ("concurrent", "sequential", "bp", "1f1b", "gpipe"):
        rate = tokens / statistics.median(each[name] for each in result["seconds"])
        told = "-"
        if name in found:
            told = f"{statistics.median(found[name]):.2f} x ({min(found[name]):.2f} to {max(found[name]):.2f})"
        lines.append(f"| {name} | {rate:.0f} | {told} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=3, help="Update windows that a method runs at a time.")
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--output", type=Path, default=RESULTS / "throughput.json")
    arguments = vars(parser.parse_args())
    rounds, windows, port, output = (arguments.pop(name) for name in ("rounds", "windows", "port", "output"))
    output.parent.mkdir(parents=True, exist_ok=True)

    def save(result: dict[str, Any]) -> None:
        output.write_text(json.dumps(result | {"torch": torch.__version__}, indent=1) + "\n", encoding="utf-8")
        print(table(result), flush=True)

    measure(Work(**arguments), rounds, windows, port, save)


if __name__ == "__main__":
    main()
