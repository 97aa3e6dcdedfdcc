"""LoPT's objective below the last chunk: a decoder of h_k tells h_{k-1}."""

import pytest
import torch
from peft import get_peft_model
from training import make_trainer, window_gradients
from zoo import class_rows, collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.stage import Entry
from peft_zerolock.staging import build_stages


@pytest.mark.parametrize(("name", "task"), [("llama", "CAUSAL_LM"), ("bert", "SEQ_CLS")])
def test_the_loss_is_ten_times_the_mean_squared_error(name, task):
    config = ZeroLockConfig(**lora_arguments(name, task), num_chunks=3, objective="reconstruction")
    model = get_peft_model(make_model(name, task), config)
    stages = build_stages(model, config, sliced=task == "CAUSAL_LM")
    batch = collate((token_rows(4) if task == "CAUSAL_LM" else class_rows(4)).rows)
    labels = batch["labels"][:, 1:] if task == "CAUSAL_LM" else batch["labels"]
    first, second = (Entry(batch, (labels != -100).sum()), stages[0].pass_on(Entry(batch, 1.0)))
    second.count = first.count
    terms = stages[1].step(second, lambda hidden: None, None)
    entered, left = second.hidden, stages[1].pass_on(second).hidden
    decoder = next(m for m in stages[1].view.module.modules() if type(m).__name__ == "Decoder")
    assert decoder.down.out_features == 4  # a quarter of 16
    errors = (decoder(left) - entered).square().mean(-1)
    if task == "CAUSAL_LM":
        mean = errors[:, :-1][labels != -100].mean()
    else:
        mean = torch.stack(
            [row[mask == 1].mean() for row, mask in zip(errors, batch["attention_mask"], strict=True)]
        ).mean()
    assert terms.task.item() == pytest.approx(10 * mean.item(), rel=1e-5)
    terms.objective.backward()
    assert all(p.grad is not None for n, p in stages[1].adapters.items() if "lora_B" in n)
    assert all(p.grad is not None for p in stages[1].readout.values())
    others = [*stages[0].adapters.values(), *stages[2].adapters.values(), *stages[0].readout.values()]
    assert all(p.grad is None for p in others)
    assert len(stages[1].readout) == 6 and not stages[2].readout


@pytest.mark.parametrize(("name", "task"), [("llama", "CAUSAL_LM"), ("bert", "SEQ_CLS")])
def test_accumulation_changes_nothing(tmp_path, name, task):
    found = []
    for size, windows in ((4, 1), (2, 2), (1, 4)):
        trainer = make_trainer(
            tmp_path,
            name,
            task,
            chunks={"num_chunks": 2, "objective": "reconstruction", "alpha": 0.7},
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=windows,
        )
        found.append(window_gradients(trainer))
        logs = trainer.state.log_history[0]
        assert logs["loss/chunk_1"] > 0 and "consistency/chunk_1" not in logs and "consistency/chunk_2" in logs
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        for key, gradient in found[0].items():
            assert torch.allclose(gradient, other[key], atol=2e-6)


def test_the_decoder_learns_and_early_exits_leave_the_chunk_out(tmp_path):
    trainer = make_trainer(
        tmp_path,
        model={"initializer_range": 0.3},
        chunks={"num_chunks": 2, "objective": "reconstruction", "readout_dim": 16},
        max_steps=200,
        learning_rate=0.03,
        trainer={"eval_dataset": token_rows(4)},
    )
    trainer.train()
    losses = [entry["loss/chunk_1"] for entry in trainer.state.log_history if "loss/chunk_1" in entry]
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert not [key for key in trainer.evaluate(per_chunk=True) if "chunk_1" in key]
