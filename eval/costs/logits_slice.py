"""Prints time and extra memory of the sliced loss against the size of the slice: how `logits_slice` got its default.

    python eval/costs/logits_slice.py                      # SmolLM2-135M's head: hidden 576, vocabulary 49,152

Each row is the loss of 1,024 supervised tokens and its gradient for the hidden states, through a frozen linear head:
the median of five runs, in turn with the other rows, and the bytes that are alive at the peak.
"""

import argparse
import statistics
import time

import torch
from counting import MemoryCounter

from peft_zerolock.objective import TokenObjective


def main() -> None:
    """Runs the rows in turn and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=576, help="size of the hidden states (default 576)")
    parser.add_argument("--vocab", type=int, default=49152, help="size of the vocabulary (default 49152)")
    parser.add_argument("--tokens", type=int, default=1024, help="supervised tokens (default 1024)")
    options = parser.parse_args()
    torch.manual_seed(0)
    head = torch.nn.Linear(options.hidden, options.vocab, bias=False).requires_grad_(False)
    hidden = torch.randn(options.tokens, options.hidden, requires_grad=True)
    targets = torch.randint(0, options.vocab, (options.tokens,))
    sizes = [size for size in (32, 64, 128, 256, 512, 1024) if size <= options.tokens]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}

    def run(size: int) -> None:
        TokenObjective(head, [], size)(hidden, targets, float(options.tokens)).objective.backward()

    for _ in range(6):
        for size in sizes:
            start = time.perf_counter()
            run(size)
            seconds[size].append(time.perf_counter() - start)
    best = min(statistics.median(times[1:]) for times in seconds.values())
    shape = f"hidden {options.hidden}, vocabulary {options.vocab}, {options.tokens} tokens"
    print(f"{shape}, {torch.get_num_threads()} threads")
    print("\n| logits_slice | time, against the fastest | extra memory at the peak, MiB |\n| --- | --- | --- |")
    for size in sizes:
        with MemoryCounter() as counted:
            run(size)
        print(f"| {size} | {statistics.median(seconds[size][1:]) / best:.2f} | {counted.peak / 2**20:.0f} |")


if __name__ == "__main__":
    main()
