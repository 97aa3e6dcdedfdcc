"""Prints the activations that a training step holds at its peak: LoRA with backpropagation against ZeroLock.

    python eval/activations.py                                   # SmolLM2-135M's shape, float32, on the CPU
    python eval/activations.py --batch 8 --length 256 --targets all-linear

The model has the shape of SmolLM2-135M with random weights. What autograd saves for a backward pass is counted with
saved-tensor hooks, parameters left out, each saved tensor at its size (a tensor saved twice counts twice, for every
row alike). Labels are on the last eighth of each sequence, as in answer-only training.
"""

import argparse

import torch
from memory import SavedActivations
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from peft_zerolock import ZeroLockConfig
from peft_zerolock.runtime import SequentialRuntime
from peft_zerolock.stage import Entry, build_stages

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "use_cache": False,
}


def peak(options: argparse.Namespace, stock: bool = False, checkpointing: bool = False, **chunks) -> float:
    """MiB held at the peak of one step; `stock` is the model's own loss and backward pass."""
    torch.manual_seed(0)
    targets = options.targets if options.targets == "all-linear" else options.targets.split(",")
    config = ZeroLockConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=targets, **chunks)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), config)
    if checkpointing:
        model.get_base_model().activation_checkpointing_enable()
    model.train()
    ids = torch.randint(3, SHAPE["vocab_size"], (options.batch, options.length))
    labels = ids.clone()
    labels[:, : -max(1, options.length // 8)] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    count = (labels[:, 1:] != -100).sum()
    stages = None if stock else build_stages(model, config, sliced=True)
    with SavedActivations(model.parameters()) as saved:
        if stages is None:
            model(**batch, num_items_in_batch=count).loss.backward()
        else:
            SequentialRuntime(stages, torch.Tensor.backward).submit(Entry(batch, count), lambda *_: None)
    return saved.peak / 2**20


def main() -> None:
    """Runs every row and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=4, help="rows (default 4)")
    parser.add_argument("--length", type=int, default=128, help="tokens a row (default 128)")
    parser.add_argument("--targets", default="q_proj,v_proj", help="LoRA's target modules (default q_proj,v_proj)")
    options = parser.parse_args()
    rows = [("LoRA with BP", peak(options, stock=True)), ("ZeroLock, 1 chunk", peak(options, num_chunks=1))]
    rows += [(f"ZeroLock, {k} chunks, default readout", peak(options, num_chunks=k)) for k in (2, 3, 4, 6)]
    bare = "ZeroLock, {} chunks, readout = the tail (the paper)"
    rows += [(bare.format(k), peak(options, num_chunks=k, readout="lm_head")) for k in (2, 3, 4, 6)]
    rows += [("LoRA with BP and checkpointing", peak(options, stock=True, checkpointing=True))]
    rows += [("ZeroLock, 3 chunks and checkpointing", peak(options, checkpointing=True, num_chunks=3))]
    print(f"batch {options.batch}, {options.length} tokens, LoRA on {options.targets}\n")
    print("| training | activations at the peak, MiB | of BP's |\n| --- | --- | --- |")
    for name, size in rows:
        print(f"| {name} | {size:.0f} | {size / rows[0][1]:.2f} |")


if __name__ == "__main__":
    main()
