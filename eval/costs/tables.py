"""Tables of the memory and throughput results, and the targets against them."""

import json
import statistics
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from counting import BASE, CATEGORIES

MIB = 2**20
ORDER = ("tinyllama", "tinyllama_split", "llama_8b", "qwen_05b", "smollm2", "smollm2_real")
ORDER += ("smollm2_answers", "smollm2_split", "smollm2_tokens", "minilm")
MEMORY_NOTE = (
    "Activations: what autograd holds for a backward pass, what checkpointing computes again for one, and the hidden "
    "states between chunks; each storage once; their most at one time. Whole: every living byte, weights, optimizer "
    "state and all, at the worst moment of a step with its update. Average: the mean of all living bytes over the "
    "moments at which something was allocated. MiB of 2^20 bytes."
)
TIME_NOTE = (
    "Tokens/s of BP and of the row are compared within a round, by the CPU time of the process; the median of the "
    "rounds, and the lowest and highest round. Wall time: the same ratio of medians, on a machine that others shared."
)


def load_results(folder: Path) -> list[dict[str, Any]]:
    """The results of one kind, in the order in which they are reported; those that are not in it last."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    return sorted(results, key=lambda result: ranks.get(result["experiment"], len(ranks)))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def at_batch(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that went well at the experiment's own batch, by method."""
    batch = result["config"]["batch"]
    here = [row for row in result["rows"] if row["status"] == "ok" and all(row[k] == v for k, v in batch.items())]
    return {row["method"]: row for row in here}


def label(result: dict[str, Any], method: str) -> str:
    """What the experiment calls a method."""
    return result["config"]["methods"][method]["label"]


def batch_words(batch: dict[str, Any]) -> str:
    """A batch in words."""
    words = f"{batch['rows']} rows of {batch['length']} tokens"
    share = batch.get("supervised")
    if share is None:
        return words
    return words + (", all supervised" if share == 1 else f", the last {round(share * batch['length'])} supervised")


def memory_table(result: dict[str, Any]) -> str:
    """What each method holds at the experiment's own batch, and against BP."""
    rows = at_batch(result)
    base = rows.get("bp")
    header = ["training", "activations, MiB", "of BP's", "whole peak, MiB", "of BP's", "average, MiB"]
    lines = []
    for name, row in rows.items():
        shares = [f"{row[key] / base[key]:.2f}" if base else "-" for key in ("activation_peak", "peak")]
        sizes = [f"{row[key] / MIB:,.0f}" for key in ("activation_peak", "peak", "average")]
        lines.append([label(result, name), sizes[0], shares[0], sizes[1], shares[1], sizes[2]])
    return table(header, lines)


def memory_section(result: dict[str, Any]) -> str:
    """All tables of one experiment."""
    rows, config = at_batch(result), result["config"]
    tensors = "fake tensors: the real step, no weights" if config["tensors"] == "fake" else "real tensors"
    parts = [f"### {config['title']}", f"{batch_words(config['batch'])}; {tensors}.", memory_table(result)]
    shown = [n for n in ("bp", "bp_checkpointing", "zerolock_3", "zerolock_3_checkpointing") if n in rows]
    categories = [[c, *(f"{rows[n]['at_peak'][c] / MIB:,.1f}" for n in shown)] for c in CATEGORIES]
    parts += [
        "Where the bytes are at the worst moment:",
        table(["MiB", *(label(result, n) for n in shown)], categories),
    ]
    return "\n\n".join([*parts, *_sweep(result), *failures(result)])


def _sweep(result: dict[str, Any]) -> list[str]:
    shapes: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["status"] == "ok":
            key = (row["rows"], row["length"], row["supervised"])
            shapes.setdefault(key, {})[row["method"]] = row
    if len(shapes) < 2:
        return []
    names = [n for n in result["config"]["methods"] if sum(n in found for found in shapes.values()) > 1]
    lines = []
    for (rows, length, supervised), found in sorted(shapes.items()):
        sizes = [[found[n][key] / MIB for key in ("activation_peak", "peak")] if n in found else [] for n in names]
        cells = [" / ".join(f"{size:,.0f}" for size in pair) or "-" for pair in sizes]
        lines.append([f"{rows} x {length}" + (", all supervised" if supervised == 1 else ""), *cells])
    return ["Activations / whole peak, by batch:", table(["batch", *(label(result, n) for n in names)], lines)]


def failures(result: dict[str, Any]) -> list[str]:
    """The rows that failed, as a list, or nothing."""
    failed = [row for row in result["rows"] if row["status"] != "ok"]
    if not failed:
        return []
    lines = [f"* `{row['method']}`: {row['error'].splitlines()[0][:200]}" for row in failed]
    return [f"Rows of {result['experiment']} that failed:", "\n".join(lines)]


def memory_tables(results: list[dict[str, Any]]) -> str:
    """All memory tables, and how what was counted with and without weights compares."""
    parts = [memory_section(result) for result in results]
    by_name = {result["experiment"]: result for result in results}
    if {"smollm2", "smollm2_real"} <= set(by_name):
        fake, real = (at_batch(by_name[name]) for name in ("smollm2", "smollm2_real"))
        worst = max(abs(fake[n]["peak"] / real[n]["peak"] - 1) for n in fake.keys() & real.keys())
        parts.append(f"SmolLM2's whole peaks without and with weights differ by {worst:.2%} at most.")
    return "\n\n".join([*parts, MEMORY_NOTE])


def speeds(result: dict[str, Any], reference: str, method: str, clock: str = "cpu_seconds") -> list[float]:
    """Tokens/s of a method as a share of the reference's, by round."""
    rows = {row["method"]: row for row in result["rows"] if row["status"] == "ok"}
    return [a / b for a, b in zip(rows[reference][clock], rows[method][clock], strict=True)]


def throughput_tables(results: list[dict[str, Any]]) -> str:
    """One table an experiment: tokens/s against BP and against BP with checkpointing."""
    parts = []
    for result in results:
        config, lines = result["config"], []
        tokens = config["batch"]["rows"] * config["batch"]["length"]
        for row in result["rows"]:
            if row["status"] != "ok":
                continue
            cells = [label(result, row["method"])]
            for reference in ("bp", "bp_checkpointing"):
                found = speeds(result, reference, row["method"])
                cells.append(f"{statistics.median(found):.2f} ({min(found):.2f} - {max(found):.2f})")
            wall = statistics.median(speeds(result, "bp", row["method"], "wall_seconds"))
            lines.append([*cells, f"{tokens / statistics.median(row['cpu_seconds']):,.0f}", f"{wall:.2f}"])
        header = [
            "training",
            "tokens/s, of BP's",
            "of BP's with checkpointing",
            "tokens per CPU second",
            "of BP's, wall",
        ]
        rounds, machine = max(len(row["cpu_seconds"]) for row in result["rows"]), result["machine"]
        parts += [
            f"### {config['title']}",
            f"{batch_words(config['batch'])}; {rounds} rounds, one thread, {machine['cpu']}.",
        ]
        parts += [table(header, lines), *failures(result)]
    return "\n\n".join([*parts, TIME_NOTE])


def _beside_weights(row: dict[str, Any]) -> int:
    return row["peak"] - row["at_peak"][BASE]


def _memory_target(results: dict[str, dict], method: str, base: str, size: Callable, limit: float, words: str):
    if "tinyllama" not in results or not {method, base} <= set(rows := at_batch(results["tinyllama"])):
        return None
    found = size(rows[method]) / size(rows[base])
    return [f"TinyLlama, {words}", f"at most {limit:.2f}", f"{found:.2f}", "yes" if found <= limit else "**no**"]


def _speed_target(results: dict[str, dict], name: str, method: str, base: str, limit: float, words: str):
    done = {row["method"] for row in results.get(name, {"rows": []})["rows"] if row["status"] == "ok"}
    if not {method, base} <= done:
        return None
    found = statistics.median(speeds(results[name], base, method))
    return [words, f"at least {limit:.2f}", f"{found:.2f}", "yes" if found >= limit else "**no**"]


def targets(memory: list[dict[str, Any]], throughput: list[dict[str, Any]]) -> str:
    """What was aimed for, as ratios, and what was measured; only what there are results for."""
    by_name = {result["experiment"]: result for result in memory}
    timed = {result["experiment"]: result for result in throughput}
    activations, whole = itemgetter("activation_peak"), itemgetter("peak")
    ours, checkpointed = "zerolock_3_checkpointing", "bp_checkpointing"
    both = "3 chunks + checkpointing against BP + checkpointing"
    rows = [
        _memory_target(by_name, "zerolock_3_tail", "bp", activations, 0.40, "3 chunks, tail: activations"),
        _memory_target(by_name, "zerolock_3", "bp", activations, 0.45, "3 chunks, defaults: activations"),
        _memory_target(by_name, "zerolock_3", "bp", whole, 0.77, "3 chunks, defaults: whole peak"),
        _memory_target(by_name, ours, checkpointed, activations, 0.80, f"{both}: activations"),
        _memory_target(by_name, ours, checkpointed, _beside_weights, 0.80, f"{both}: all but base weights"),
        _memory_target(by_name, ours, checkpointed, whole, 0.80, f"{both}: whole peak"),
        _speed_target(timed, "smollm2_answers", "zerolock_2", "bp", 0.92, "SmolLM2, answers, 2 chunks: tokens/s"),
        _speed_target(timed, "smollm2_answers", "zerolock_3", "bp", 0.88, "SmolLM2, answers, 3 chunks: tokens/s"),
        _speed_target(
            timed,
            "smollm2_answers",
            "zerolock_3",
            checkpointed,
            1.15,
            "SmolLM2, answers, 3 chunks: of BP + checkpointing",
        ),
        _speed_target(timed, "smollm2_tokens", "zerolock_2", "bp", 0.75, "SmolLM2, every token, 2 chunks: tokens/s"),
        _speed_target(timed, "smollm2_tokens", "zerolock_3", "bp", 0.75, "SmolLM2, every token, 3 chunks: tokens/s"),
    ]
    return table(["ratio", "target", "measured", "met"], [row for row in rows if row is not None])
