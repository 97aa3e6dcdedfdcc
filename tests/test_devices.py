"""Chunks on different devices: the same numbers as on one, and each device holds its own chunk and its readout."""

import copy
from typing import Any

import cards  # noqa: F401  (makes the devices)
import pytest
import torch
import zoo
from accelerate import dispatch_model
from peft import PeftModel
from small_runs import losses, make_arguments, make_trainer

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, ZeroLockTrainingArguments
from peft_zerolock.blocks import find_blocks
from peft_zerolock.planning.blank import Blank, blank_model
from peft_zerolock.planning.count import StepCount
from peft_zerolock.planning.devices import parse_devices
from peft_zerolock.planning.trial import Trial
from peft_zerolock.planning.uses import uses_of

CARDS = ["lazy:1", "lazy:2", "lazy:3"]
RUN: dict[str, Any] = {"runtime": "concurrent", "optim": "adamw_torch"}
FOUR = {"num_hidden_layers": 4}


def weights(trainer: ZeroLockTrainer) -> dict[str, torch.Tensor]:
    """What was learnt, on the CPU."""
    named = [*trainer.model.named_parameters(), *trainer.readouts.items()]
    return {name: p.detach().cpu() for name, p in named if p.requires_grad}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def modes(trainer: ZeroLockTrainer) -> list[bool]:
    """Of every module of every stage."""
    return [module.training for s in trainer.stages for tree in s.trees().values() for module in tree.modules()]


def trained(folder: Any, devices: list[str] | None, *where: str, **options: Any) -> ZeroLockTrainer:
    trainer = make_trainer(folder, *where, devices=devices, **(RUN | options))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("where", "chunks", "options"),
    [
        (("llama", "CAUSAL_LM"), 3, {}),
        (("llama", "CAUSAL_LM"), 2, {"config": {"readout": "lm_head", "alpha": 0.5}}),
        (("llama", "CAUSAL_LM"), 2, {"config": {"readout": "adapter"}}),
        (("llama", "CAUSAL_LM"), 2, {"config": {"readout": "bottleneck", "train_chunks": [-1, 1]}}),
        (("llama", "CAUSAL_LM"), 2, {"config": {"readout": "vocab", "readout_vocab": 20, "control": True}}),
        (("llama", "CAUSAL_LM"), 2, {"config": {"logits_slice": None}, "gradient_accumulation_steps": 2}),
        (("llama", "CAUSAL_LM"), 2, {"config": {"train_chunks": [-1]}, "activation_checkpointing": True}),
        (("llama", "SEQ_CLS"), 3, {"config": {"readout_blocks": 1, "control": True}}),
        (("bert", "SEQ_CLS"), 3, {"gradient_accumulation_steps": 2}),
        (("bert", "SEQ_CLS"), 2, {"config": {"objective": "reconstruction"}}),
        (("bert", "SEQ_CLS"), 2, {"config": {"control": True, "alpha": 0.5}}),
        (("deberta", "SEQ_CLS"), 3, {"config": {"readout": "lm_head"}}),
    ],
)
def test_several_devices_give_the_numbers_of_one(tmp_path, monkeypatch, where, chunks, options):
    options = options | {"config": {"num_chunks": chunks} | options.get("config", {}), "model": FOUR, "max_steps": 2}
    one = trained(tmp_path / "one", ["lazy:1"] * chunks, *where, **options)
    # Trainer makes its batches and sums on the first device, as it does with GPUs.
    first = property(lambda self: self._setup_devices and torch.device(CARDS[0]))
    monkeypatch.setattr(ZeroLockTrainingArguments, "device", first)
    several = trained(tmp_path / "several", CARDS[:chunks], *where, **options)
    assert [str(stage.device) for stage in several.stages] == CARDS[:chunks]
    assert losses(several) == losses(one) and len(losses(one)) == 2
    assert_equal(weights(several), weights(one))
    assert several.readouts.keys() == one.readouts.keys() and modes(several) == modes(one)
    found, expected = (
        {key: value for key, value in trainer.evaluate(per_chunk=True).items() if "loss" in key}
        for trainer in (several, one)
    )
    assert found == expected


@pytest.mark.parametrize("name", ["gpt2", "opt_projected", "gemma3", "mixtral", "roberta", "distilbert"])
def test_other_models_run_on_several_devices(tmp_path, name):
    task = "SEQ_CLS" if name in (*zoo.ENCODERS, "gpt2") else "CAUSAL_LM"
    model = {"experts_implementation": "eager"} if name == "mixtral" else {}  # the others need kernels the CPU lacks
    one, several = (
        trained(tmp_path / folder, devices, name, task, max_steps=2, model=model)
        for folder, devices in (("one", ["lazy:1"] * 2), ("several", CARDS[:2]))
    )
    assert losses(several) == losses(one)
    assert_equal(weights(several), weights(one))
    assert several.evaluate()["eval_loss"] == one.evaluate()["eval_loss"]


def on_cards(base: Any, first: int) -> Any:
    """The model as `from_pretrained` leaves it with a device map: some blocks on a card, the others on the next."""
    blocks = find_blocks(base)
    prefix = next(name for name, module in base.named_modules() if module is blocks)
    inside = {f"{prefix}.{i}": CARDS[i >= first] for i in range(len(blocks))}
    outer = {name: CARDS[0] for name in ("model.embed_tokens", "model.rotary_emb", "lm_head")}
    return dispatch_model(base, outer | inside | {"model.norm": CARDS[1]}, main_device=CARDS[0])


def test_a_device_map_settles_the_cuts(tmp_path):
    base = zoo.make_model("llama", **FOUR)
    mapped = trained(tmp_path / "mapped", None, model=on_cards(copy.deepcopy(base), 1), max_steps=2)
    assert [len(stage.chunk) for stage in mapped.stages] == [1, 3]
    assert [str(stage.device) for stage in mapped.stages] == CARDS[:2]
    assert mapped.is_model_parallel and mapped.zerolock_config.chunk_sizes == [1, 3]
    given = {"num_chunks": None, "chunk_sizes": [1, 3]}
    one = trained(tmp_path / "one", ["lazy:1"] * 2, model=base, config=given, max_steps=2)
    assert losses(mapped) == losses(one)
    assert_equal(weights(mapped), weights(one))
    assert mapped.evaluate()["eval_loss"] == one.evaluate()["eval_loss"]


def held(trainer: ZeroLockTrainer) -> dict[str, int]:
    """Bytes of the weights on each device: the model's and the stages' own."""
    trees = [trainer.model, *(tree for stage in trainer.stages for tree in stage.trees().values())]
    found: dict[str, dict[int, int]] = {}
    for tensor in (t for tree in trees for t in (*tree.parameters(), *tree.buffers())):
        storage = tensor.untyped_storage()
        found.setdefault(str(tensor.device), {})[storage.data_ptr()] = storage.nbytes()
    return {device: sum(sizes.values()) for device, sizes in sorted(found.items())}


def size(*modules: Any) -> int:
    return sum(t.numel() * t.element_size() for m in modules for t in (*m.parameters(), *m.buffers()))


@pytest.mark.parametrize("tied", [True, False])
def test_each_device_holds_its_chunk_and_its_tail_only(tmp_path, tied):
    base = zoo.make_model("llama", tie_word_embeddings=tied)
    parts = base.model
    table, block, always = size(base.lm_head), size(parts.layers[0]), size(parts.norm, base.lm_head, parts.rotary_emb)
    trainer = make_trainer(tmp_path, model=base, devices=CARDS, config={"num_chunks": 3, "readout": "lm_head"}, **RUN)
    adapters = sum(p.numel() * 4 for p in trainer.model.parameters() if p.requires_grad) // 3
    found = held(trainer)
    assert list(found) == CARDS
    first, *others = (size - block - adapters - always for size in found.values())
    assert (first, others) == (0 if tied else table, [0, 0])


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        (("llama", "CAUSAL_LM"), {"readout": "lm_head"}),
        (("llama", "CAUSAL_LM"), {"readout_blocks": 1, "train_chunks": [1, 3]}),
        (("bert", "SEQ_CLS"), {}),
    ],
)
def test_a_plan_says_what_each_device_holds(tmp_path, where, settings):
    base = zoo.make_model(*where, num_hidden_layers=4)
    config = ZeroLockConfig(**zoo.lora_arguments(*where), num_chunks=3, **settings)
    mode = Blank()
    trial = Trial(
        blank_model(base.config, config, torch.float32, mode), config, local=True, checkpointing=False, mode=mode
    )
    uses = uses_of(trial, [StepCount()] * 3, parse_devices(["a:1GiB", "b:1GiB", "c:1GiB"]), "adamw", 1)
    expected = [use.weights + use.copies + use.adapters + use.readouts for use in uses]
    trainer = make_trainer(tmp_path, *where, model=base, devices=CARDS, config={"num_chunks": 3} | settings, **RUN)
    assert list(held(trainer).values()) == expected


def test_copies_of_blocks_are_told_with_their_bytes(tmp_path, caplog):
    base = zoo.make_model("llama", intermediate_size=40, **FOUR)
    block = size(base.model.layers[0])
    trainer = make_trainer(tmp_path, model=base, devices=CARDS[:2], **RUN)
    assert len(trainer.stages) == 2
    (told,) = [record.message for record in caplog.records if "copies" in record.message]
    assert f"copies of these: {2 * block:,} bytes on lazy:1. Much" in told and "readout='lm_head'" in told


def test_a_run_resumes_and_its_adapter_loads_on_one_device(tmp_path):
    base = zoo.make_model("llama")
    options = {"devices": CARDS[:2], "save_strategy": "steps", "save_steps": 2, "max_steps": 3, **RUN}
    options["config"] = {"control": True}
    whole = make_trainer(tmp_path, model=copy.deepcopy(base), **options)
    whole.train()
    again = make_trainer(tmp_path, model=copy.deepcopy(base), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 3
    assert_equal(weights(again), weights(whole))
    whole.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter"))
    ids = torch.arange(3, 11).reshape(1, 8)
    with torch.no_grad():
        there, here = (model.eval()(input_ids=ids).logits for model in (whole.model, loaded))
        assert torch.equal(there, loaded.to("lazy:1")(input_ids=ids.to("lazy:1")).logits.cpu())
    assert torch.allclose(there, here, atol=1e-5)


def test_the_whole_model_generates_on_several_devices(tmp_path):
    base = zoo.make_model("llama")
    trainer = make_trainer(tmp_path, model=copy.deepcopy(base), devices=CARDS[:2], **RUN)
    ids = torch.arange(3, 11).reshape(1, 8)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(trainer.model.generate(input_ids=ids, **options), base.generate(input_ids=ids, **options))


def test_hooks_of_a_device_map_do_not_reach_the_stages(tmp_path):
    base = zoo.make_model("llama")
    hooked = dispatch_model(copy.deepcopy(base), {"": "cpu"}, force_hooks=True)
    one, other = (trained(tmp_path / name, ["cpu", "cpu"], model=m) for name, m in (("a", base), ("b", hooked)))
    assert hasattr(other.model.get_base_model(), "_hf_hook")
    assert not any("_hf_hook" in vars(m) for s in other.stages for tree in s.trees().values() for m in tree.modules())
    assert losses(other) == losses(one)
    assert_equal(weights(other), weights(one))


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        (["cpu"], r"devices=\['cpu'\] are 1, and the model has 2 chunk\(s\)"),
        (["cpu", "cuda:99"], r"cuda:99 is not there"),
        (["cpu", "meta"], r"meta is not there"),
        (["lazy:1", "lazy:9"], r"lazy:9 is not there"),
        (["cpu", "lazy:1"], r"of several types"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(tmp_path, devices, told):
    base = zoo.make_model("llama")
    with pytest.raises(ValueError, match=told):
        make_trainer(tmp_path, model=base, devices=devices, **RUN)
    assert all(p.device.type == "cpu" for p in base.parameters())


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({}, {"runtime": "sequential"}, r"spread over \['lazy:1', 'lazy:2'\].*runtime='concurrent'"),
        ({"num_chunks": 1}, {}, r"num_chunks=1: the blocks lie in 2 runs of \[1, 3\].*use 2 to 4 chunks"),
        (
            {"num_chunks": None, "chunk_sizes": [2, 2]},
            {},
            r"chunk_sizes=\[2, 2\]: chunk 1, blocks 0 to 1, would lie on lazy:1 and lazy:2.*chunk_sizes=\[1, 3\] fits",
        ),
        ({}, {"devices": ["lazy:1", "lazy:2"]}, r"device_map disagree: chunk 1, blocks 0 to 1.*Leave devices out"),
        (
            {"num_chunks": None, "chunk_sizes": [1, 3]},
            {"devices": ["lazy:2", "lazy:1"]},
            r"device_map disagree: chunk 1, blocks 0 to 0, lies on lazy:1",
        ),
    ],
)
def test_what_does_not_fit_a_device_map_is_refused(tmp_path, config, options, told):
    base = on_cards(zoo.make_model("llama", **FOUR), 1)
    with pytest.raises(ValueError, match=told):
        make_trainer(tmp_path, model=base, config=config, **(RUN | options))


def test_offloaded_weights_are_refused(tmp_path):
    base = zoo.make_model("llama")
    base.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"offloaded \(disk\).*max_memory"):
        make_trainer(tmp_path, model=base, **RUN)


def test_devices_need_a_loaded_model(tmp_path):
    arguments = make_arguments(tmp_path, devices=CARDS[:2], **RUN)
    with pytest.raises(ValueError, match=r"devices=.*model='some/name': load the model"):
        ZeroLockTrainer(model="some/name", args=arguments)


def test_what_is_trained_must_lie_with_its_chunk(tmp_path):
    settings = {"modules_to_save": ["lm_head"]}
    with pytest.raises(ValueError, match=r"lm_head.* is trained by chunk 2 on lazy:2, but .* lies on lazy:1"):
        make_trainer(tmp_path, devices=CARDS[:2], config=settings, model={"tie_word_embeddings": True}, **RUN)


def test_quantised_weights_are_not_moved(tmp_path):
    base = zoo.make_model("llama")
    base.model.layers[2].self_attn.q_proj.weight.quant_state = object()
    with pytest.raises(ValueError, match=r"model.layers.2.* is quantised and cannot be moved to lazy:2"):
        make_trainer(tmp_path, model=base, devices=CARDS[:2], **RUN)


def test_an_evaluation_that_would_move_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"bf16_full_eval=True moves the whole model.*leave it out"):
        make_trainer(tmp_path, devices=CARDS[:2], bf16_full_eval=True, **RUN)
