"""Invariant 1: one chunk with alpha = 1 is the stock Trainer with LoraConfig."""

import pytest
import torch
from training import largest_difference, make_trainer, weights, window_gradients
from zoo import token_rows

REENTRANT = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
RUNS = {
    "plain": {},
    "accumulation with uneven lengths": {"gradient_accumulation_steps": 3},
    "a short last window": {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"activation_checkpointing": True},
    "reentrant checkpointing": {"activation_checkpointing": True, **REENTRANT},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "dropout": {"model": {"attention_dropout": 0.1}, "lora": {"lora_dropout": 0.1}},
    "another optimizer": {"optim": "adafactor"},
    "sgd with weight decay": {"optim": "sgd", "weight_decay": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "bf16 base": {"dtype": torch.bfloat16},
    "gpt2": {"name": "gpt2"},
    "mixtral with a balance loss": {"name": "mixtral", "model": {"output_router_logits": True}},
}
HEADS = {
    "bert": {"name": "bert", "task": "SEQ_CLS"},
    "llama": {"name": "llama", "task": "SEQ_CLS"},
    "bert bf16": {"name": "bert", "task": "SEQ_CLS", "bf16": True},
    "bert smoothing": {"name": "bert", "task": "SEQ_CLS", "label_smoothing_factor": 0.1},
    "deberta": {"name": "deberta", "task": "SEQ_CLS"},
}


@pytest.mark.parametrize("run", [*RUNS.values(), *HEADS.values()], ids=[*RUNS, *(f"classes {n}" for n in HEADS)])
def test_unsliced_is_stock_to_the_bit(tmp_path, run):
    stock = make_trainer(tmp_path, **run, stock=True)
    stock.train()
    ours = make_trainer(tmp_path, **run, chunks={"num_chunks": 1, "logits_slice": None})
    ours.train()
    assert largest_difference(weights(stock), weights(ours)) == 0.0
    assert [row["loss"] for row in ours.state.log_history if "loss" in row] == [
        row["loss"] for row in stock.state.log_history if "loss" in row
    ]


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_sliced_gradients_are_stock_s(tmp_path, run):
    stock = window_gradients(make_trainer(tmp_path, stock=True, **run))
    ours = window_gradients(make_trainer(tmp_path, chunks={"num_chunks": 1, "logits_slice": 3}, **run))
    tolerance = 1e-3 if run.get("bf16") or "dtype" in run else 1e-6
    assert stock.keys() == ours.keys()
    for name, gradient in stock.items():
        assert (gradient - ours[name]).abs().max() <= tolerance * max(1.0, gradient.abs().max().item())


def test_resumed_is_stock_too(tmp_path):
    runs = {}
    for kind, settings in (("stock", {"stock": True}), ("ours", {"chunks": {"num_chunks": 1, "logits_slice": None}})):
        folder = tmp_path / kind
        save = {"save_strategy": "steps", "save_steps": 2}
        make_trainer(folder, **settings, **save).train()
        resumed = make_trainer(folder, **settings, **save)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        runs[kind] = weights(resumed)
    assert largest_difference(runs["stock"], runs["ours"]) == 0.0


def test_evaluation_is_stock_s(tmp_path):
    data = {"eval_dataset": token_rows(6, seed=4)}
    stock = make_trainer(tmp_path, trainer=data, stock=True).evaluate()
    ours = make_trainer(tmp_path, trainer=data, chunks={"num_chunks": 3}).evaluate()
    assert ours["eval_loss"] == stock["eval_loss"]
