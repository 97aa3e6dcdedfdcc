"""The loss scale of an update window, and batches that could break it (CASES.md, "Training")."""

import math

import pytest
import torch
from training import largest_difference, make_trainer, weights, window_gradients
from transformers import Trainer
from zoo import Rows, class_rows, collate, token_rows

from peft_zerolock import ZeroLockMixin
from peft_zerolock.stage import Entry


def _window(tmp_path, rows, batch, accumulation, **kwargs):
    trainer = make_trainer(
        tmp_path,
        data=rows,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=1e6,
        **kwargs,
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return window_gradients(trainer)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("logits_slice", [3, None])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_6x1_3x2_and_2x3_micro_batches_give_equal_gradients(tmp_path, num_chunks, logits_slice, alpha):
    chunks = {"num_chunks": num_chunks, "logits_slice": logits_slice, "alpha": alpha, "readout": "blocks"}
    rows = token_rows(6)
    six, three, two = (_window(tmp_path, rows, b, n, chunks=chunks) for b, n in ((6, 1), (3, 2), (2, 3)))
    assert largest_difference(six, three) <= 1e-6
    assert largest_difference(six, two) <= 1e-6
    assert max(g.abs().max() for g in six.values()) > 1e-3


@pytest.mark.parametrize("kind", ["classes", "values", "tokens"])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_classification_windows_are_scaled_too(tmp_path, kind, num_chunks, alpha):
    rows = {"classes": class_rows(6), "values": class_rows(6, regression=True), "tokens": token_rows(6)}[kind]
    if kind == "tokens":
        rows = Rows([row | {"labels": [t if t < 0 else t % 3 for t in row["labels"]]} for row in rows.rows])
    settings = {
        "name": "bert",
        "task": "TOKEN_CLS" if kind == "tokens" else "SEQ_CLS",
        "model": {"num_labels": 1, "problem_type": "regression"} if kind == "values" else {},
        "chunks": {"num_chunks": num_chunks, "alpha": alpha},
    }
    whole, parts = (_window(tmp_path, rows, b, n, **settings) for b, n in ((6, 1), (2, 3)))
    assert largest_difference(whole, parts) <= 1e-6
    assert max(g.abs().max() for g in whole.values()) > 1e-3


def test_the_last_short_window_is_not_scaled_down(tmp_path):
    """10 rows with accumulation 4 at batch 1: the third window has two micro-batches."""
    found = []

    def run(batch, accumulation):
        trainer = make_trainer(
            tmp_path,
            data=token_rows(10),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=-1,
            num_train_epochs=1,
            optim="sgd",
            max_grad_norm=0.0,
            chunks={"num_chunks": 2},
        )
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainer.train()
        found.append(weights(trainer))

    run(1, 4)
    run(4, 1)
    assert largest_difference(*found) <= 1e-6


@pytest.mark.parametrize("logits_slice", [4, None])
def test_a_window_without_targets_changes_nothing_and_is_counted(tmp_path, caplog, logits_slice):
    rows = token_rows(2)
    masked = Rows([row | {"labels": [-100] * len(row["labels"])} for row in rows.rows])
    trainer = make_trainer(
        tmp_path, data=masked, max_steps=3, weight_decay=0.5, chunks={"num_chunks": 2, "logits_slice": logits_slice}
    )
    before = weights(trainer)
    trainer.train()
    assert largest_difference(before, weights(trainer)) == 0.0
    assert trainer.windows_without_targets == 3
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses == [0.0, 0.0, 0.0]


def test_a_masked_micro_batch_within_a_window_is_left_out(tmp_path):
    rows = token_rows(4).rows
    masked = [row | {"labels": [-100] * len(row["labels"])} for row in rows[2:]]
    with_masked = _window(tmp_path, Rows(rows[:2] + masked), 2, 2, chunks={"num_chunks": 2})
    without = _window(tmp_path, Rows(rows[:2]), 2, 1, chunks={"num_chunks": 2})
    assert largest_difference(with_masked, without) <= 1e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "task"), [("llama", "CAUSAL_LM"), ("bert", "SEQ_CLS")])
def test_trainable_weights_are_float32_over_a_half_base(tmp_path, dtype, name, task):
    trainer = make_trainer(tmp_path, name=name, task=task, dtype=dtype, chunks={"num_chunks": 2, "readout": "blocks"})
    before = weights(trainer)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in trainer.readouts.values()} == {torch.float32}
    moved = weights(trainer)
    assert all(not torch.equal(before[n], moved[n]) for n in moved if "lora_B" in n)
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


def test_fp16_mixed_precision_scales_and_unscales_once(tmp_path):
    """CPU has no fp16 scaler in Trainer; a scaler of torch's own is put in its place, as on CUDA."""
    plain = window_gradients(make_trainer(tmp_path, chunks={"num_chunks": 2}))
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.accelerator.native_amp = True
    trainer.accelerator.state._mixed_precision = "fp16"
    unscaled = []
    clip = type(trainer)._clip_grad_norm

    def record(model):
        norm = clip(trainer, model)
        if not unscaled:
            unscaled.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return norm

    trainer.args.max_grad_norm = 1e6
    trainer._clip_grad_norm = record
    trainer.train()
    for name, gradient in unscaled[0].items():
        assert (gradient - plain[name]).abs().max() < 2e-3


def test_each_chunk_adds_its_own_routers_balance_term(tmp_path):
    settings = {"name": "mixtral", "lora": {"target_modules": ["q_proj", "gate"]}}
    with_balance = {"model": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}
    without = window_gradients(make_trainer(tmp_path, **settings, chunks={"num_chunks": 3, "readout_rows": 1.0}))
    ours = window_gradients(
        make_trainer(tmp_path, **settings, **with_balance, chunks={"num_chunks": 3, "readout_rows": 1.0})
    )
    assert without.keys() == ours.keys()
    gates = [n for n in ours if "lora_B" in n]
    assert {n.split(".layers.")[1][0] for n in gates} == {"0", "1", "2"}
    for layer in "012":
        changed = [not torch.allclose(ours[n], without[n], atol=1e-7) for n in gates if f".layers.{layer}." in n]
        assert any(changed)


@pytest.mark.parametrize("tie", [True, False])
def test_the_last_chunk_s_loss_is_the_model_s_with_lora_on_the_head(tmp_path, tie):
    """trl#5676: a hand-made loss reads lm_head.weight and misses its LoRA."""
    targets = ["q_proj", "v_proj"] if tie else ["q_proj", "v_proj", "lm_head"]
    trainer = make_trainer(
        tmp_path, model={"tie_word_embeddings": tie}, lora={"target_modules": targets}, chunks={"num_chunks": 2}
    )
    trainer.train()

    batch = collate(token_rows(3, seed=8).rows)
    count = (batch["labels"][:, 1:] != -100).sum()
    entry, sent = Entry(batch, count), []
    with torch.no_grad():
        trainer.stages[0].step(entry, sent.append, None)
        ours = trainer.stages[1].step(Entry(batch, count, sent[0]), None, None).task
        trainer.model.eval()
        assert abs(ours - trainer.model(**batch).loss) < 1e-6


def _scaled_as_stock(tmp_path, trainer_classes=(None, None), prepare=lambda trainer: None, **settings):
    """The first window's gradients of one chunk and of the stock Trainer, accumulation 2."""
    found = []
    for kind, trainer_class in zip(({"stock": True}, {"chunks": {"num_chunks": 1}}), trainer_classes, strict=True):
        trainer = make_trainer(
            tmp_path, gradient_accumulation_steps=2, max_steps=1, trainer_class=trainer_class, **kind, **settings
        )
        prepare(trainer)
        found.append(window_gradients(trainer))
    stock, ours = found
    largest = max(g.abs().max() for g in stock.values())
    assert largest > 1e-4
    assert largest_difference(stock, ours) <= 1e-6 * max(1.0, largest)


def test_models_that_take_no_item_count_are_scaled_as_stock(tmp_path):
    _scaled_as_stock(tmp_path, prepare=lambda trainer: setattr(trainer, "model_accepts_loss_kwargs", False))


class _MeanTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class _OurMeanTrainer(ZeroLockMixin, _MeanTrainer):
    pass


class _CountedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class _OurCountedTrainer(ZeroLockMixin, _CountedTrainer):
    pass


def test_an_overridden_mean_loss_is_divided_where_it_says_so(tmp_path):
    def say_so(trainer):
        trainer.loss_is_scaled_for_ga = False

    _scaled_as_stock(tmp_path, (_MeanTrainer, _OurMeanTrainer), say_so)


def test_an_overridden_classification_loss_gets_the_item_count(tmp_path):
    _scaled_as_stock(tmp_path, (_CountedTrainer, _OurCountedTrainer), name="bert", task="SEQ_CLS")


def test_dropout_of_a_lora_on_the_head_is_drawn_in_the_sliced_loss_too(tmp_path):
    lora = {"target_modules": ["lm_head"], "lora_dropout": 0.9}
    trainer = make_trainer(
        tmp_path, model={"tie_word_embeddings": False}, lora=lora, chunks={"num_chunks": 1}, max_steps=1
    )
    trainer.train()
    modules = trainer.stages[-1].tail.view.module.modules()
    drawn = [m for m in modules if isinstance(m, torch.nn.Dropout) and m.p == 0.9]
    assert len(drawn) == 1 and drawn[0].training


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("saved", [["norm"], ["input_layernorm"], ["embed_tokens", "lm_head"]])
def test_saved_modules_anywhere_over_a_half_base(tmp_path, dtype, saved):
    settings = {"model": {"tie_word_embeddings": False}, "lora": {"modules_to_save": saved}, "dtype": dtype}
    trainer = make_trainer(tmp_path, **settings, chunks={"num_chunks": 2, "readout_dim": 2})
    trainer.train()
    learned = [p for p in trainer.model.parameters() if p.requires_grad]
    own = [p for stage in trainer.stages for p in stage.readout.values()]
    assert {p.dtype for p in [*learned, *own]} == {torch.float32}
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


def test_trained_biases_of_a_half_base_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"bias='all'.*torch.bfloat16.*float32.*bias='none'"):
        make_trainer(tmp_path, "qwen2", dtype=torch.bfloat16, lora={"bias": "all"}, chunks={"num_chunks": 2})


@pytest.mark.parametrize("masked", [0, 1])
def test_a_window_without_targets_under_a_loss_scale(tmp_path, masked):
    rows = token_rows(4).rows
    rows[masked] = rows[masked] | {"labels": [-100] * len(rows[masked]["labels"])}
    settings = {"per_device_train_batch_size": 1, "max_steps": 4, "weight_decay": 0.1}
    trainer = make_trainer(tmp_path, data=Rows(rows), chunks={"num_chunks": 2}, **settings)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    assert trainer.windows_without_targets == 1
    assert trainer.state.global_step == 4


def test_batches_without_labels_say_what_is_missing(tmp_path):
    rows = Rows([{"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1]}] * 4)
    trainer = make_trainer(tmp_path, data=rows, chunks={"num_chunks": 2})
    trainer.data_collator = lambda batch: {k: torch.tensor([row[k] for row in batch]) for k in batch[0]}
    with pytest.raises(ValueError, match="no labels, only input_ids, attention_mask"):
        trainer.train()
