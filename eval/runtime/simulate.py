"""What 3 and 8 stages would bring: a SIMULATION from the measured time of each stage's parts, checked on 2 stages.

    python eval/runtime/simulate.py             # measures the parts, writes results/runtime/simulation.json, plots
    python eval/runtime/simulate.py --report    # prints the tables from the results that are there

The parts of each stage (until h_k is sent, the rest, the optimizer step; a pipeline's forward and backward pass) are
measured alone, one thread, as CPU seconds of that thread, so that other work on the machine does not count. The
transfer of a hidden state between two processes is the one that throughput.py measured; between threads there is none.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from pipelines import SCHEDULES, Part, loss_of
from schedules import Times, local_seconds, pipeline_seconds
from throughput import RESULTS, ratios, table
from torch import Tensor
from workload import Work, learning, load_stages

from peft_zerolock.runtime import SequentialRuntime

STAGES = (2, 3, 8)
WINDOWS = 20
DEPTH = 2


def local_times(work: Work, num_chunks: int, repeats: int) -> list[Times]:
    """The parts of the stages' own training; medians."""
    _, stages = load_stages(work, num_chunks)
    found: list[list[list[float]]] = [[[], [], []] for _ in stages]
    optimizers = [torch.optim.AdamW([group], lr=1e-4) for group in learning(stages)]
    runtime = SequentialRuntime(stages, torch.Tensor.backward)
    for stage, parts in zip(stages, found, strict=True):
        stage.step = _timed_step(stage, parts)  # type: ignore[method-assign]
    original = runtime.backward

    def backward(objective: Tensor) -> None:
        start = time.thread_time()
        original(objective)
        found[len(done) % len(stages)][1][-1] += time.thread_time() - start
        done.append(1)

    done: list[int] = []
    runtime.backward = backward
    for _ in range(repeats + 1):
        runtime.submit(work.entries(0)[0], None)
        for stage, optimizer, parts in zip(stages, optimizers, found, strict=True):
            start = time.thread_time()
            stage.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            parts[2].append(time.thread_time() - start)
    return [Times(*(statistics.median(part[1:]) for part in parts)) for parts in found]


def _timed_step(stage: Any, parts: list[list[float]]) -> Any:
    original = stage.step

    def step(entry: Any, send: Any, loss: Any) -> Any:
        start = time.thread_time()
        sent: list[float] = []

        def timed(hidden: Tensor) -> None:
            sent.append(time.thread_time())
            send(hidden)

        terms = original(entry, timed, loss)
        end = time.thread_time()
        parts[0].append((sent or [end])[0] - start)
        parts[1].append(end - (sent or [end])[0])
        return terms

    return step


def pipeline_times(work: Work, num_stages: int, repeats: int) -> list[Times]:
    """The parts of a backpropagation pipeline's stages; medians."""
    _, stages = load_stages(work, num_stages)
    rows = work.rows(0)
    received = rows["input_ids"][: work.batch]
    labels = rows["labels"][: work.batch]
    times = []
    for stage in stages:
        part, loss = Part(stage), loss_of(stages[-1], work)
        optimizer = torch.optim.AdamW(list(stage.adapters.values()), lr=1e-4)
        found: list[list[float]] = [[], [], []]
        for _ in range(repeats + 1):
            given = received.detach().requires_grad_(received.is_floating_point())
            marks = [time.thread_time()]
            left = part(given)
            marks.append(time.thread_time())
            loss(left, labels).backward() if stage.is_last else left.backward(torch.ones_like(left))
            marks.append(time.thread_time())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.thread_time())
            for seconds, start, end in zip(found, marks, marks[1:], strict=False):
                seconds.append(end - start)
        times.append(Times(*(statistics.median(seconds[1:]) for seconds in found)))
        received = left.detach()
    return times


def simulated(local: list[Times], pipeline: list[Times], micro_batches: int, windows: int, transfer: float) -> dict:
    """Ratios of the concurrent runtime's throughput to the pipelines', and to its own stages one after the other."""
    ours = local_seconds(local, micro_batches, windows, 0.0, DEPTH)
    found = {
        name: pipeline_seconds(name, pipeline, micro_batches, windows, transfer) / ours for name in reversed(SCHEDULES)
    }
    alone = sum(windows * (micro_batches * (t.forward + t.backward) + t.update) for t in local)
    return found | {"its stages in turn": alone / ours}


def results() -> tuple[dict[str, Any], Work, dict[int, tuple[list[Times], list[Times]]]]:
    """What was measured, the work it was measured on, and by number of stages the times of ours and the pipelines'."""
    measured = json.loads((RESULTS / "throughput.json").read_text(encoding="utf-8"))
    found = json.loads((RESULTS / "simulation.json").read_text(encoding="utf-8"))["times"]
    times = {
        int(number): ([Times(**t) for t in kinds["local"]], [Times(**t) for t in kinds["pipeline"]])
        for number, kinds in found.items()
    }
    return measured, Work(**measured["work"]), times


def report() -> str:
    """The measured table and the simulated one."""
    measured, work, times = results()
    windows, rounds = measured["windows"], len(measured["seconds"])
    lines = [
        f"Measured: {work.batch} rows of {work.length} tokens a micro-batch, {work.micro_batches} micro-batches a "
        f"window, readout {work.readout!r}; {rounds} rounds of {windows} windows; 2 threads, or 2 processes of 1.",
        "",
        table(measured),
        "",
        "Simulated, NOT measured (only the times of the stages' parts are): how many times as fast concurrent is.",
        "",
        "| stages | 1f1b | gpipe | its stages in turn |",
        "| --- | --- | --- | --- |",
    ]
    for number, (local, pipeline) in times.items():
        found = simulated(local, pipeline, work.micro_batches, WINDOWS, measured["transfer"])
        lines.append(f"| {number} | " + " | ".join(f"{value:.2f} x" for value in found.values()) + " |")
    lines += ["", f"The simulation of what was measured, 2 stages and {windows} windows:"]
    checked = simulated(*times[2], work.micro_batches, windows, measured["transfer"])
    for name in SCHEDULES:
        ratio = statistics.median(ratios(measured["seconds"])[name])
        off = checked[name] / ratio - 1
        lines.append(f"- {name}: {checked[name]:.2f} x simulated, {ratio:.2f} x measured ({off:+.0%})")
    return "\n".join(lines)


def draw() -> Any:
    """Simulated ratios over the number of stages, and the measured ones."""
    from matplotlib.figure import Figure

    measured, work, times = results()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in SCHEDULES:
        each = [simulated(*times[n], work.micro_batches, WINDOWS, measured["transfer"])[name] for n in times]
        axes.plot(list(times), each, "o--", label=f"against {name}, SIMULATED")
        axes.plot([2], [statistics.median(ratios(measured["seconds"])[name])], "s", label=f"against {name}, measured")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_xlabel("stages")
    axes.set_ylabel("throughput of the concurrent runtime, ratio")
    axes.set_xticks(list(times))
    axes.legend()
    return figure


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="Measure nothing; print what is there.")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.report:
        torch.set_num_threads(1)
        work = Work(**json.loads((RESULTS / "throughput.json").read_text(encoding="utf-8"))["work"])
        times = {
            number: {
                "local": [asdict(t) for t in local_times(work, number, arguments.repeats)],
                "pipeline": [asdict(t) for t in pipeline_times(work, number, arguments.repeats)],
            }
            for number in STAGES
        }
        result = {"work": asdict(work), "times": times, "torch": torch.__version__}
        (RESULTS / "simulation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw().savefig(RESULTS / "throughput.png", dpi=120)
    print(report())


if __name__ == "__main__":
    main()
