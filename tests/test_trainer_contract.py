"""The Trainer contract (DESIGN.md): every line works or is refused with the remedy."""

import pytest
import torch
import transformers as hf
from training import arguments, largest_difference, make_trainer, weights
from transformers import Trainer, TrainerCallback
from zoo import collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig, ZeroLockMixin, ZeroLockTrainer, ZeroLockTrainingArguments
from peft_zerolock.contract import check_arguments, check_launcher


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad"])
def test_optimizers_have_groups_of_their_own_for_each_chunk(tmp_path, optim):
    trainer = make_trainer(
        tmp_path, optim=optim, chunks={"num_chunks": 2, "readout": "adapter", "readout_learning_rate": 0.5}
    )
    before = weights(trainer)
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert {group["chunk"] for group in groups} == {"chunk_1", "chunk_2"}
    readout = {id(p) for p in trainer.readouts.values()}
    for group in groups:
        own = {id(p) in readout for p in group["params"]}
        assert len(own) == 1
        assert group["initial_lr"] == (0.5 if own == {True} else 1e-2)
    learned = [p for group in groups for p in group["params"]]
    assert len(learned) == len({id(p) for p in learned}) == len(before) + len(readout)
    after = weights(trainer)
    assert all(not torch.equal(before[n], after[n]) for n in before if "lora_B" in n)


def test_stepping_all_chunks_equals_stepping_them_one_by_one(tmp_path):
    together = make_trainer(tmp_path, chunks={"num_chunks": 3}, max_grad_norm=0.01)
    together.train()
    alone = {}
    for k in (1, 2, 3):
        # A chunk's input depends on the lower chunks' updates, so those learn along; the upper ones never matter.
        trainer = make_trainer(
            tmp_path, chunks={"num_chunks": 3, "train_chunks": list(range(1, k + 1))}, max_grad_norm=0.01
        )
        trainer.train()
        alone |= {n: p for n, p in weights(trainer).items() if f".layers.{k - 1}." in n}
    assert largest_difference(weights(together), alone) == 0.0


def test_readout_warmup_trains_only_the_readouts_at_first(tmp_path):
    trainer = make_trainer(
        tmp_path, "bert", "SEQ_CLS", chunks={"num_chunks": 2, "readout_warmup_ratio": 0.5}, max_steps=4
    )
    history = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            lora = [p for n, p in trainer.stages[0].adapters.items() if "lora_B" in n]
            readout = [p for n, p in trainer.stages[0].readout.items() if "lora_B" in n]
            history.append((any(p.abs().sum() > 0 for p in lora), all(p.abs().sum() > 0 for p in readout)))

    trainer.add_callback(Watch())
    trainer.train()
    assert history == [(False, True), (False, True), (True, True), (True, True)]


def test_a_loss_of_one_s_own_is_used_for_every_chunk(tmp_path):
    calls = []

    def half(outputs, labels, num_items_in_batch=None):
        calls.append(outputs.logits.shape[-1])
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return 0.5 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2}, trainer={"compute_loss_func": half}, max_steps=1)
    trainer.train()
    assert calls == [64, 64]
    plain = make_trainer(tmp_path, chunks={"num_chunks": 2, "logits_slice": None}, max_steps=1)
    plain.train()
    for key in ("loss", "loss/chunk_1"):
        assert 2 * trainer.state.log_history[0][key] == pytest.approx(plain.state.log_history[0][key], rel=1e-5)


class _AccuracyTrainer(Trainer):
    """Overrides compute_loss as TRL's SFTTrainer does: it looks at the outputs on the way."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.accuracies = [*getattr(self, "accuracies", []), outputs.logits.argmax(-1).float().mean().item()]
        return (loss, outputs) if return_outputs else loss


class _MixedTrainer(ZeroLockMixin, _AccuracyTrainer):
    pass


def test_the_mixin_composes_with_another_trainer(tmp_path):
    mixed = make_trainer(tmp_path, chunks={"num_chunks": 2}, trainer_class=_MixedTrainer)
    mixed.train()
    plain = make_trainer(tmp_path, chunks={"num_chunks": 2, "logits_slice": None})
    plain.train()
    assert len(mixed.accuracies) == 8
    assert largest_difference(weights(mixed), weights(plain)) == 0.0


def test_wrapping_by_the_trainer_is_wrapping_by_hand(tmp_path):
    by_hand = make_trainer(tmp_path, chunks={"num_chunks": 2})
    base = make_model("llama")
    torch.manual_seed(42)
    trainer = ZeroLockTrainer(
        model=base,
        args=arguments(tmp_path),
        peft_config=ZeroLockConfig(**lora_arguments("llama"), num_chunks=2),
        train_dataset=token_rows(24),
        data_collator=collate,
    )
    assert weights(trainer).keys() == weights(by_hand).keys()
    trainer.train()
    assert trainer.state.global_step == 4


def test_model_init_and_a_second_train(tmp_path):
    trainer = ZeroLockTrainer(
        model_init=lambda: make_model("llama"),
        args=arguments(tmp_path),
        peft_config=ZeroLockConfig(**lora_arguments("llama"), num_chunks=2),
        train_dataset=token_rows(24),
        data_collator=collate,
    )
    trainer.train()
    first = weights(trainer)
    trainer.train()
    assert largest_difference(first, weights(trainer)) == 0.0


def test_training_can_go_on_with_the_same_trainer(tmp_path):
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "readout": "adapter"})
    trainer.train()
    first = weights(trainer)
    trainer.train()
    assert largest_difference(first, weights(trainer)) > 0


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_torch_compile(tmp_path, task):
    plain = make_trainer(tmp_path, task=task, chunks={"num_chunks": 2}, max_steps=2)
    plain.train()
    compiled = make_trainer(
        tmp_path,
        task=task,
        chunks={"num_chunks": 2},
        max_steps=2,
        torch_compile=True,
        torch_compile_backend="aot_eager",
    )
    compiled.train()
    assert largest_difference(weights(plain), weights(compiled)) < 1e-4


def test_an_optimizer_of_one_s_own(tmp_path):
    for readout, refused in (("lm_head", False), ("adapter", True)):
        trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "readout": readout})
        own = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad], lr=0.5)
        trainer.optimizer = own
        if refused:
            with pytest.raises(ValueError, match="readout='adapter'.*optimizer_cls_and_kwargs"):
                trainer.train()
        else:
            before = weights(trainer)
            trainer.train()
            assert largest_difference(before, weights(trainer)) > 0
    trainer = make_trainer(
        tmp_path,
        chunks={"num_chunks": 2, "readout": "adapter"},
        trainer={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})},
    )
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)


def test_one_step_runs_in_turn_start_from_clean_readout_gradients(tmp_path):
    trainer = make_trainer(
        tmp_path,
        chunks={"num_chunks": 2, "readout": "adapter"},
        max_steps=1,
        optim="sgd",
        max_grad_norm=0.0,
        learning_rate=1e-6,
    )
    trainer.train()
    first = {n: p.grad.clone() for n, p in trainer.readouts.items()}
    trainer.train()
    second = {n: p.grad for n, p in trainer.readouts.items()}
    assert max(g.abs().max() for g in first.values()) > 0
    assert all((second[n] - first[n]).abs().max() < 0.5 * first[n].abs().max() + 1e-3 for n in first)


def test_averaging_tokens_off_and_seeds(tmp_path):
    runs = []
    for seed in (1, 1, 2):
        trainer = make_trainer(tmp_path, chunks={"num_chunks": 2}, seed=seed, average_tokens_across_devices=False)
        trainer.train()
        runs.append(weights(trainer))
    assert largest_difference(runs[0], runs[1]) == 0.0
    assert largest_difference(runs[0], runs[2]) > 0.0


def test_auto_find_batch_size(tmp_path):
    trainer = make_trainer(
        tmp_path, chunks={"num_chunks": 2}, auto_find_batch_size=True, per_device_train_batch_size=4
    )
    step, sizes = trainer.training_step, []

    def crowded(model, inputs, *rest):
        sizes.append(len(inputs["input_ids"]))
        if len(inputs["input_ids"]) > 3:
            raise RuntimeError("CUDA out of memory.")
        return step(model, inputs, *rest)

    trainer.training_step = crowded
    trainer.train()
    assert sizes[0] == 4 and set(sizes[1:]) <= {2, 3}
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["q_proj"]}, "galore_adamw_layerwise"),
    ],
)
def test_refused_arguments_name_the_remedy(tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"ZeroLockTrainer does not work with .*{message}.*adamw_torch"):
        make_trainer(tmp_path, chunks={"num_chunks": 2}, **settings)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 2}}, "DeepSpeed: .*Leave `deepspeed` out"),
        ("fsdp", "full_shard", "FSDP: .*Leave `fsdp` out"),
    ],
)
def test_refused_environments(tmp_path, attribute, value, message):
    args = arguments(tmp_path)
    object.__setattr__(args, attribute, value)
    with pytest.raises(ValueError, match=message):
        check_arguments(args)


def test_several_visible_gpus_are_refused_where_the_model_lies_on_one(tmp_path):
    args = arguments(tmp_path)
    object.__setattr__(args, "_n_gpu", 2)
    config = ZeroLockConfig(**lora_arguments("llama"), num_chunks=2)
    with pytest.raises(ValueError, match=r"DataParallel \(2 visible GPUs.*CUDA_VISIBLE_DEVICES.*devices=\[\.\.\.\]"):
        ZeroLockTrainer(model=make_model("llama"), args=args, peft_config=config)


def test_split_sequences_are_refused(tmp_path):
    from accelerate.parallelism_config import ParallelismConfig

    args = arguments(tmp_path)
    args.parallelism_config = ParallelismConfig(cp_size=2)
    with pytest.raises(ValueError, match=r"parallelism_config with \{'cp': 2\}"):
        check_arguments(args)


def test_a_model_spread_over_devices_is_refused(tmp_path):
    base = make_model("llama")
    base.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match=r"spread over \['0', '1'\].*runtime='concurrent'"):
        ZeroLockTrainer(
            model=base, args=arguments(tmp_path), peft_config=ZeroLockConfig(**lora_arguments("llama"), num_chunks=2)
        )


def test_no_pad_token_is_refused_and_padding_sides_agree(tmp_path):
    base = make_model("llama", "SEQ_CLS")
    base.config.pad_token_id = None
    config = ZeroLockConfig(**lora_arguments("llama", "SEQ_CLS"), num_chunks=2)
    with pytest.raises(ValueError, match="pad_token_id"):
        ZeroLockTrainer(model=base, args=arguments(tmp_path), peft_config=config)
    trainer = make_trainer(tmp_path, task="SEQ_CLS", chunks={"num_chunks": 2})
    trainer.model.eval()
    right = {"input_ids": torch.tensor([[5, 6, 7, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    left = {"input_ids": torch.tensor([[0, 0, 5, 6, 7]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    with torch.no_grad():
        for batch in (right, left):
            sent = []
            ports = [stage.view.ports for stage in trainer.stages]
            for stage in trainer.stages:
                stage.view.module.eval()
            trainer.stages[0].view.module(**batch)
            ports[1].received = ports[0].left
            ours = trainer.stages[1].view.module(**batch).logits
            assert torch.equal(ours, trainer.model(**batch).logits)
            sent.append(ours)
        positions = {"position_ids": torch.tensor([[0, 0, 0, 1, 2]])}
        shifted = trainer.model(**left, **positions).logits
        assert torch.allclose(shifted, trainer.model(**right).logits, atol=1e-6)


def test_the_arguments_say_how_to_run():
    parser = hf.HfArgumentParser(ZeroLockTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "x", "--use_cpu"])
    assert args.runtime == "sequential"
    with pytest.raises(ValueError, match="runtime='warp'"):
        ZeroLockTrainingArguments(output_dir="x", runtime="warp")


def test_norms_of_readouts_do_not_decay(tmp_path):
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "readout": "adapter"}, weight_decay=0.1)
    trainer.train()
    names = {id(p): n for n, p in trainer.readouts.items()}
    decaying = [p for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]]
    found = sorted(names[id(p)].split("adapter.")[1] for p in decaying if id(p) in names)
    assert found == ["down.weight", "up.weight"]


def test_a_model_s_name_is_refused_where_the_trainer_does_not_load_models(tmp_path):
    with pytest.raises(ValueError, match="peft_config was given with model='some/model'"):
        ZeroLockTrainer(model="some/model", args=arguments(tmp_path), peft_config=ZeroLockConfig())


def test_a_launcher_s_sharding_is_refused():
    with pytest.raises(ValueError, match="FSDP, which the launcher asks for"):
        check_launcher(fsdp=True, deepspeed=False)
    with pytest.raises(ValueError, match="DeepSpeed, which the launcher asks for"):
        check_launcher(fsdp=False, deepspeed=True)
