"""What is saved is a plain LoRA adapter: another process, with PEFT alone, gets the same logits from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_runs import changed, losses, make_arguments, make_trainer, read_json, snapshot
from transformers import AutoModelForCausalLM, Trainer

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, load_adapter

CASES = {
    "llama": {"model": "llama", "task": "CAUSAL_LM", "heads": [], "dtype": "float32"},
    "llama in bfloat16": {"model": "llama", "task": "CAUSAL_LM", "heads": [], "dtype": "bfloat16"},
    "llama, head saved": {"model": "llama", "task": "CAUSAL_LM", "heads": ["lm_head"], "dtype": "float32"},
    "llama classifier": {"model": "llama", "task": "SEQ_CLS", "heads": ["score"], "dtype": "float32"},
    "bert classifier": {"model": "bert", "task": "SEQ_CLS", "heads": ["classifier"], "dtype": "float32"},
    "deberta classifier": {
        "model": "deberta",
        "task": "SEQ_CLS",
        "heads": ["pooler", "classifier"],
        "dtype": "float32",
    },
}
SAVED_HEADS = {"llama, head saved": {"lm_head"}, "llama classifier": {"score"}, "bert classifier": {"classifier"}} | {
    "deberta classifier": {"pooler", "classifier"}
}
# A bfloat16 weight has 8 significant bits, so merging rounds each one by up to 2**-9 of its size. Measured on these
# models: logits off by 0.7 % of the largest one.
BF16_MERGE = 2**-6


def batch_of(task: str) -> dict[str, torch.Tensor]:
    rows = zoo.token_rows(4, seed=9) if task == "CAUSAL_LM" else zoo.class_rows(4, seed=9)
    return {key: value for key, value in zoo.collate(rows.rows).items() if key != "labels"}


def logits_of(model: torch.nn.Module, task: str = "CAUSAL_LM") -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch_of(task)).logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each case trained for three steps, saved, and read by a process that has plain PEFT alone."""
    folder = tmp_path_factory.mktemp("saved")
    runs = {}
    for name, case in CASES.items():
        base = zoo.make_model(case["model"], case["task"]).to(getattr(torch, case["dtype"]))
        config = {"modules_to_save": ["lm_head"]} if name == "llama, head saved" else {}
        trainer = make_trainer(folder / name, case["model"], case["task"], config=config, model=base)
        dtypes = {n: p.dtype for n, p in trainer.model.named_parameters()}
        trainer.train()
        assert {n: p.dtype for n, p in trainer.model.named_parameters()} == dtypes
        trainer.save_model()
        (folder / case["task"]).mkdir(exist_ok=True)
        torch.save(batch_of(case["task"]), folder / case["task"] / "batch.pt")
        runs[name] = (trainer, logits_of(trainer.model, case["task"]), folder / name)
    (folder / "cases.json").write_text(json.dumps(CASES))
    reader = Path(__file__).parent / "plain_peft_reader.py"
    done = subprocess.run(
        [sys.executable, str(reader), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "not imported"
    return runs, torch.load(folder / "answers.pt")


@pytest.mark.parametrize("name", CASES)
def test_plain_peft_gets_the_same_logits_without_a_warning(trained, name):
    runs, answers = trained
    trainer, expected, _ = runs[name]
    assert answers[name]["warnings"] == []
    assert torch.allclose(answers[name]["logits"], expected, rtol=0, atol=1e-6)
    with trainer.model.disable_adapter():
        untrained = logits_of(trainer.model, CASES[name]["task"])
    assert (untrained - expected).abs().max() > 1e-3  # else equal logits would say nothing


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_float32_before_in_the_file_and_after(trained, name):
    runs, answers = trained
    trainer, _, folder = runs[name]
    assert {p.dtype for n, p in trainer.model.named_parameters() if p.requires_grad} == {torch.float32}
    assert {t.dtype for t in load_file(folder / "adapter_model.safetensors").values()} == {torch.float32}
    assert answers[name]["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("name", CASES)
def test_the_file_holds_adapters_and_saved_modules_and_no_readout(trained, name):
    trainer, _, folder = trained[0][name]
    keys = set(load_file(folder / "adapter_model.safetensors"))
    heads = SAVED_HEADS.get(name, set())
    lora = {key for key in keys if key.endswith(("lora_A.weight", "lora_B.weight"))}
    blocks = {key.split("layer.")[-1].split("layers.")[-1].split(".")[0] for key in lora}
    assert blocks == {"0", "1", "2"}
    assert len(lora) == 12
    assert {key.removeprefix("base_model.model.").split(".")[0] for key in keys - lora} == heads
    trained_names = {n.replace(".default", "") for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert keys == {n.replace(".modules_to_save", "") for n in trained_names}
    assert "readouts.safetensors" not in os.listdir(folder)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "zerolock_config.json"} <= set(
        os.listdir(folder)
    )


def test_the_saved_folder_is_a_stock_trainers_and_our_settings(trained, tmp_path):
    base = zoo.make_model("llama")
    model = get_peft_model(base, LoraConfig(**zoo.lora_arguments("llama")))
    stock = Trainer(
        model=model, args=make_arguments(tmp_path), train_dataset=zoo.token_rows(4), data_collator=zoo.collate
    )
    stock.save_model()
    folder = trained[0]["llama"][2]
    assert set(os.listdir(folder)) == set(os.listdir(tmp_path)) | {"zerolock_config.json"}
    ours, plain = (read_json(f / "adapter_config.json") for f in (folder, tmp_path))
    assert sorted(ours.pop("target_modules")) == sorted(plain.pop("target_modules"))
    assert ours == plain


def test_a_deberta_whose_pooler_would_not_be_saved_is_refused(tmp_path):
    base = zoo.make_model("deberta", "SEQ_CLS")
    with pytest.raises(ValueError, match=r"pooler.*neither trained nor saved.*modules_to_save=\['pooler'\]"):
        make_trainer(tmp_path, "deberta", "SEQ_CLS", config={"modules_to_save": None}, model=base)


# ---- merging ----


def test_merging_in_float32_is_exact(trained):
    _, expected, folder = trained[0]["llama"]
    merged = PeftModel.from_pretrained(zoo.make_model("llama"), folder).merge_and_unload()
    assert torch.allclose(logits_of(merged), expected, rtol=0, atol=1e-5)


def test_merging_in_bfloat16_stays_within_its_tolerance(trained):
    _, expected, folder = trained[0]["llama in bfloat16"]
    base = zoo.make_model("llama").to(torch.bfloat16)
    merged = PeftModel.from_pretrained(base, folder).merge_and_unload()
    error = (logits_of(merged).float() - expected.float()).abs().max()
    assert 0 < error <= BF16_MERGE * expected.abs().max()


# ---- tied embeddings ----


def test_default_targets_leave_tied_embeddings_byte_for_byte(tmp_path):
    base = zoo.make_model("llama", tie_word_embeddings=True)
    before = base.get_input_embeddings().weight.detach().clone()
    trainer = make_trainer(tmp_path, config={"target_modules": None}, model=base)
    start = snapshot(trainer.model)
    trainer.train()
    assert torch.equal(base.get_input_embeddings().weight, before)
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert all("lora_" in name for name in changed(trainer.model, start))
    trainer.save_model()
    assert not any("embed" in key or "lm_head" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    merged = trainer.model.merge_and_unload()
    assert torch.equal(merged.get_input_embeddings().weight, before)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("ensure", [False, True])
def test_lora_on_one_end_of_tied_embeddings_is_refused(tmp_path, module, ensure):
    config = {"target_modules": ["q_proj", module], "ensure_weight_tying": ensure}
    with pytest.raises(ValueError, match=r"tied.*modules_to_save"):
        make_trainer(tmp_path, config=config, model={"tie_word_embeddings": True})


def test_a_saved_head_of_a_tied_model_is_exact_after_merging_saving_and_loading(tmp_path):
    config = {"modules_to_save": ["lm_head"]}
    trainer = make_trainer(tmp_path / "run", config=config, model={"tie_word_embeddings": True})
    before = trainer.model.get_base_model().get_input_embeddings().weight.detach().clone()
    trainer.train()
    expected = logits_of(trainer.model)
    assert torch.equal(trainer.model.get_base_model().get_input_embeddings().weight, before)
    trainer.save_model()
    reloaded = PeftModel.from_pretrained(zoo.make_model("llama", tie_word_embeddings=True), tmp_path / "run")
    assert torch.allclose(logits_of(reloaded), expected, rtol=0, atol=1e-6)
    reloaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of(merged), expected, rtol=0, atol=1e-5)


# ---- nesting ----


def test_a_peft_model_in_a_peft_model_is_refused(tmp_path):
    arguments = zoo.lora_arguments("llama")
    inner = get_peft_model(zoo.make_model("llama"), LoraConfig(**arguments))
    with pytest.warns(UserWarning):
        outer = get_peft_model(inner, ZeroLockConfig(**arguments))
    with pytest.raises(ValueError, match=r"inside a PeftModel.*merge_and_unload"):
        ZeroLockTrainer(model=outer, args=make_arguments(tmp_path), train_dataset=zoo.token_rows(2))


@pytest.mark.parametrize("unwrapped", [False, True], ids=["PeftModel", "its base"])
def test_peft_config_on_a_model_with_adapters_is_refused(tmp_path, unwrapped):
    model = get_peft_model(zoo.make_model("llama"), ZeroLockConfig(**zoo.lora_arguments("llama")))
    given = model.get_base_model() if unwrapped else model
    with pytest.raises(ValueError, match=r"already has adapters.*leave peft_config out"):
        make_trainer(tmp_path, model=given)


# ---- loading with the chunk settings ----


def test_load_adapter_gives_plain_pefts_logits_and_the_chunk_settings(trained):
    _, expected, folder = trained[0]["llama"]
    model = load_adapter(zoo.make_model("llama"), folder)
    assert torch.allclose(logits_of(model), expected, rtol=0, atol=1e-6)
    assert type(model.peft_config["default"]) is ZeroLockConfig
    assert model.peft_config["default"].num_chunks == 2
    assert not any(p.requires_grad for p in model.parameters())


def test_a_loaded_adapter_can_be_trained_further(trained, tmp_path):
    trainer, _, folder = trained[0]["llama"]
    model = load_adapter(zoo.make_model("llama"), folder, is_trainable=True)
    again = ZeroLockTrainer(
        model=model, args=make_arguments(tmp_path), train_dataset=zoo.token_rows(8), data_collator=zoo.collate
    )
    again.train()
    assert losses(again)[-1]["loss/chunk_1"] != losses(trainer)[-1]["loss/chunk_1"]
    assert len(losses(again)) == 3


@pytest.mark.parametrize(
    ("saved", "base", "told"),
    [
        ({}, 2, r"\(at least\) 3 blocks.*LlamaForCausalLM has 2"),
        ({}, 4, r"\(at least\) 3 blocks.*LlamaForCausalLM has 4"),
        ({"layers_to_transform": [2]}, 2, r"\(at least\) 3 blocks.*has 2"),
        ({"chunk_sizes": [2, 1], "num_chunks": None, "layers_to_transform": [0]}, 4, r"of 3 blocks.*has 4"),
    ],
    ids=["shallower", "deeper", "only the last block", "chunk sizes tell"],
)
def test_an_adapter_of_another_depth_is_refused_with_both_depths(tmp_path, saved, base, told):
    settings = zoo.lora_arguments("llama") | {"num_chunks": 2} | saved
    get_peft_model(zoo.make_model("llama"), ZeroLockConfig(**settings)).save_pretrained(tmp_path)
    model = zoo.make_model("llama", num_hidden_layers=base)
    before = snapshot(model)
    with pytest.raises(ValueError, match=told):
        load_adapter(model, tmp_path)
    assert changed(model, before) == set()


EXPERTS = {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("llama", {"layers_to_transform": [0]}),
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("llama", {"modules_to_save": ["mlp"], "layers_to_transform": [1]}),
        ("opt", {"bias": "all", "layers_to_transform": [1]}),
        ("mixtral", EXPERTS),
        ("mixtral", EXPERTS | {"target_modules": ["q_proj"], "layers_to_transform": [0]}),
    ],
    ids=str,
)
def test_an_adapter_that_fits_is_taken(tmp_path, name, saved):
    settings = zoo.lora_arguments(name) | {"init_lora_weights": False} | saved
    model = get_peft_model(zoo.make_model(name), ZeroLockConfig(**settings))
    model.save_pretrained(tmp_path)
    loaded = load_adapter(zoo.make_model(name), str(tmp_path))
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_targets_that_the_file_leaves_to_peft_do_not_stand_in_the_way(tmp_path, targets):
    settings = zoo.lora_arguments("llama")
    get_peft_model(zoo.make_model("llama"), ZeroLockConfig(**settings)).save_pretrained(tmp_path)
    config = read_json(tmp_path / "adapter_config.json") | {"target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert isinstance(load_adapter(zoo.make_model("llama"), tmp_path), PeftModel)
    with pytest.raises(ValueError, match=r"\(at least\) 3 blocks.*has 2: it has weights for blocks \[0, 1, 2\]\."):
        load_adapter(zoo.make_model("llama", num_hidden_layers=2), tmp_path)


@pytest.mark.parametrize("base", [2, 4])
def test_an_adapter_of_experts_of_another_depth_is_refused(tmp_path, base):
    settings = zoo.lora_arguments("mixtral") | EXPERTS
    get_peft_model(zoo.make_model("mixtral"), ZeroLockConfig(**settings)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"\(at least\) 3 blocks.*has {base}"):
        load_adapter(zoo.make_model("mixtral", num_hidden_layers=base), tmp_path)


def test_load_adapter_refuses_a_model_with_adapters_and_a_folder_without_weights(trained, tmp_path):
    folder = trained[0]["llama"][2]
    with pytest.raises(ValueError, match="already has adapters"):
        load_adapter(load_adapter(zoo.make_model("llama"), folder), folder)
    ZeroLockConfig(**zoo.lora_arguments("llama")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors"):
        load_adapter(zoo.make_model("llama"), tmp_path)
