"""ZeroLockConfig: its range checks, its files, and that it stays a LoraConfig for everything that PEFT does."""

import copy
import dataclasses
import json
import pickle
import warnings

import huggingface_hub.constants
import pytest
import torch
import zoo
from hub_server import HubServer
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from small_runs import read_json
from transformers import HfArgumentParser

from peft_zerolock import ZeroLockConfig, ZeroLockTrainingArguments

OWN = {
    *("num_chunks", "chunk_sizes", "train_chunks", "alpha", "consistency", "consistency_first", "logits_slice"),
    *("readout", "readout_dim", "readout_blocks", "readout_blocks_from", "readout_vocab"),
    *("readout_weights", "readout_rows"),
    *("readout_learning_rate", "readout_warmup_ratio", "objective", "control"),
}
RICH = {
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.1,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 2},
    "layers_to_transform": [0, 2],
    "modules_to_save": ["lm_head"],
}
CHUNKED = {
    "chunk_sizes": [2, 1],
    "train_chunks": [-1],
    "alpha": 0.5,
    "consistency": "reverse",
    "consistency_first": False,
    "readout": "blocks",
    "readout_dim": 2,
    "readout_blocks": 0.5,
    "readout_blocks_from": "next",
    "readout_weights": "own",
    "readout_rows": 0.5,
    "readout_learning_rate": 0.01,
    "readout_warmup_ratio": 0.25,
    "logits_slice": 7,
}

COMMIT = "0" * 40


@pytest.fixture
def saved(tmp_path):
    ZeroLockConfig(**RICH, **CHUNKED).save_pretrained(tmp_path)
    return tmp_path


# ---- files ----


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"readout": "vocab", "readout_vocab": {9, 3}}, {"readout_vocab": [3, 9]}),
        ({"readout": "vocab", "readout_vocab": (4, 3)}, {"readout_vocab": [3, 4]}),
        ({"chunk_sizes": (2, 1), "train_chunks": (2,)}, {"chunk_sizes": [2, 1], "train_chunks": [2]}),
    ],
    ids=str,
)
def test_sets_and_tuples_become_lists_that_json_can_hold(tmp_path, given, kept):
    config = ZeroLockConfig(task_type="CAUSAL_LM", **given)
    assert {name: getattr(config, name) for name in kept} == kept
    config.save_pretrained(tmp_path)
    assert ZeroLockConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize("arguments", [{}, RICH], ids=["defaults", "rich"])
def test_adapter_config_equals_a_plain_loraconfigs_key_for_key(tmp_path, arguments):
    ZeroLockConfig(**arguments, **CHUNKED | {"readout_warmup_ratio": 0}).save_pretrained(tmp_path / "ours")
    LoraConfig(**arguments).save_pretrained(tmp_path / "plain")
    ours, plain = (read_json(tmp_path / who / "adapter_config.json") for who in ("ours", "plain"))
    assert sorted(ours.pop("target_modules") or []) == sorted(plain.pop("target_modules") or [])
    assert ours == plain
    assert ours["peft_type"] == "LORA"
    assert not OWN & set(ours)


def test_adapter_config_equals_a_plain_one_after_wrapping_and_saving(tmp_path):
    arguments = RICH | {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    get_peft_model(zoo.make_model("llama"), ZeroLockConfig(**arguments, **CHUNKED)).save_pretrained(tmp_path / "ours")
    get_peft_model(zoo.make_model("llama"), LoraConfig(**arguments)).save_pretrained(tmp_path / "plain")
    ours, plain = (read_json(tmp_path / who / "adapter_config.json") for who in ("ours", "plain"))
    assert sorted(ours.pop("target_modules")) == sorted(plain.pop("target_modules"))
    assert ours == plain
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "plain").iterdir()} | {
        "zerolock_config.json"
    }


def test_the_side_file_holds_exactly_our_fields(saved):
    assert read_json(saved / "zerolock_config.json") == CHUNKED | {
        **{"num_chunks": None, "readout_vocab": None, "objective": "task", "control": False}
    }
    assert set(read_json(saved / "zerolock_config.json")) == OWN
    assert sorted(p.name for p in saved.iterdir()) == ["adapter_config.json", "zerolock_config.json"]


def test_from_pretrained_gives_the_same_config_back(saved):
    again = ZeroLockConfig.from_pretrained(str(saved))
    assert type(again) is ZeroLockConfig
    assert again == ZeroLockConfig(**RICH, **CHUNKED)
    assert ZeroLockConfig.from_pretrained(saved.parent, subfolder=saved.name) == again


def test_plain_peft_reads_a_loraconfig_without_a_word(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reader in (PeftConfig, LoraConfig):
            config = reader.from_pretrained(str(saved))
            assert type(config) is LoraConfig
            assert config == LoraConfig(**RICH)


def test_a_plain_lora_adapter_gets_default_chunks_and_a_warning(tmp_path, caplog):
    LoraConfig(**RICH).save_pretrained(tmp_path)
    config = ZeroLockConfig.from_pretrained(str(tmp_path))
    assert config == ZeroLockConfig(**RICH)
    assert "zerolock_config.json" in caplog.text
    assert "defaults" in caplog.text


def test_the_heads_that_peft_names_again_are_read_once(tmp_path):
    heads = ["classifier", "pooler", "classifier", "score", "pooler"]
    LoraConfig(**RICH | {"modules_to_save": heads}).save_pretrained(tmp_path)
    assert ZeroLockConfig.from_pretrained(tmp_path).modules_to_save == ["classifier", "pooler", "score"]
    for _ in range(3):
        config = ZeroLockConfig.from_pretrained(tmp_path)
        config.target_modules, config.layers_to_transform, config.task_type = {"query"}, None, "SEQ_CLS"
        model = get_peft_model(zoo.make_model("bert", "SEQ_CLS"), config)
        model.save_pretrained(tmp_path)
        assert len(read_json(tmp_path / "adapter_config.json")["modules_to_save"]) == 5  # ours, and PEFT's two


@pytest.fixture
def cached(tmp_path):
    """The Hub's cache with a snapshot of a repository that has an adapter_config.json and nothing else."""
    repository = tmp_path / "models--someone--adapter"
    LoraConfig(**RICH).save_pretrained(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path


@pytest.fixture(params=["offline", "local files only", "unreachable"])
def no_hub(request, monkeypatch):
    """The three ways of not asking the Hub; the arguments that go with each."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", request.param == "offline")
    with HubServer() as gone:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return {"local_files_only": True} if request.param == "local files only" else {}


def test_a_hub_that_cannot_be_asked_is_an_error_and_no_plain_adapter(cached, no_hub, caplog):
    with pytest.raises(ValueError, match=r"zerolock_config\.json of 'someone/adapter'.*Hub.*hf download"):
        ZeroLockConfig.from_pretrained("someone/adapter", cache_dir=cached, **no_hub)
    assert "plain LoRA" not in caplog.text


def test_a_plain_adapter_is_known_as_one_without_the_hub(cached, no_hub, caplog):
    """The Hub said before that the repository has no such file."""
    absent = cached / "models--someone--adapter" / ".no_exist" / COMMIT / "zerolock_config.json"
    absent.parent.mkdir(parents=True)
    absent.touch()
    config = ZeroLockConfig.from_pretrained("someone/adapter", cache_dir=cached, **no_hub)
    assert config == ZeroLockConfig(**RICH)
    assert "plain LoRA" in caplog.text


def test_a_folder_without_an_adapter_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="adapter_config.json"):
        ZeroLockConfig.from_pretrained(str(tmp_path))


def test_an_unknown_setting_in_the_side_file_is_an_error(saved):
    side = saved / "zerolock_config.json"
    side.write_text(json.dumps(read_json(side) | {"from_the_future": 1}))
    with pytest.raises(ValueError, match=r"from_the_future.*upgrade"):
        ZeroLockConfig.from_pretrained(str(saved))


@pytest.mark.parametrize("content", ["", '{"alpha": ', "[1, 2]"], ids=["empty", "cut", "list"])
def test_a_damaged_side_file_is_an_error_that_names_it(saved, content):
    (saved / "zerolock_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"zerolock_config\.json.*damaged"):
        ZeroLockConfig.from_pretrained(str(saved))


def test_a_value_out_of_range_in_the_side_file_is_refused(saved):
    side = saved / "zerolock_config.json"
    side.write_text(json.dumps(read_json(side) | {"alpha": 2}))
    with pytest.raises(ValueError, match="alpha=2"):
        ZeroLockConfig.from_pretrained(str(saved))


# ---- copies ----


@pytest.mark.parametrize(
    "copied",
    [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy, copy.copy, dataclasses.replace],
    ids=["pickle", "deepcopy", "copy", "replace"],
)
def test_copies_are_equal_and_of_our_class(copied):
    config = ZeroLockConfig(**RICH, **CHUNKED)
    again = copied(config)
    assert type(again) is ZeroLockConfig
    assert again == config
    assert again.chunk_settings() == config.chunk_settings()


def test_replace_changes_one_field_and_checks_it():
    config = ZeroLockConfig(**RICH, **CHUNKED)
    other = dataclasses.replace(config, alpha=0.75, r=2)
    assert (other.alpha, other.r, other.chunk_sizes) == (0.75, 2, [2, 1])
    assert config.alpha == 0.5
    with pytest.raises(ValueError, match="alpha=7"):
        dataclasses.replace(config, alpha=7)


def test_to_dict_has_the_keys_of_a_loraconfig():
    ours = ZeroLockConfig(**RICH, **CHUNKED).to_dict()
    assert ours == LoraConfig(**RICH).to_dict()


def test_add_weighted_adapter_combines_two_zerolock_adapters(tmp_path):
    arguments = zoo.lora_arguments("llama") | {"init_lora_weights": False}
    model = get_peft_model(zoo.make_model("llama"), ZeroLockConfig(**arguments, num_chunks=3), adapter_name="one")
    model.add_adapter("two", ZeroLockConfig(**arguments, num_chunks=3))
    model.add_weighted_adapter(["one", "two"], [0.5, 2.0], "sum", combination_type="cat")
    assert type(model.peft_config["sum"]) is ZeroLockConfig
    assert model.peft_config["sum"].num_chunks == 3
    assert model.peft_config["sum"].r == 8
    layer = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    expected = 0.5 * layer.get_delta_weight("one") + 2.0 * layer.get_delta_weight("two")
    assert torch.allclose(layer.get_delta_weight("sum"), expected, atol=1e-6)
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    assert ZeroLockConfig.from_pretrained(tmp_path / "sum").num_chunks == 3
    assert isinstance(PeftModel.from_pretrained(zoo.make_model("llama"), tmp_path / "sum"), PeftModel)


# ---- how to run ----


def test_arguments_are_parsed_from_flags(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--runtime", "sequential", "--learning_rate", "0.5", "--use_cpu", "true"]
    (arguments,) = HfArgumentParser(ZeroLockTrainingArguments).parse_args_into_dataclasses(flags)
    assert (arguments.runtime, arguments.learning_rate) == ("sequential", 0.5)


def test_an_unknown_runtime_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"runtime='x'.*'sequential'"):
        ZeroLockTrainingArguments(output_dir=str(tmp_path), runtime="x", use_cpu=True)
    with pytest.raises(ValueError, match="runtime='x'"):
        HfArgumentParser(ZeroLockTrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--runtime", "x", "--use_cpu", "true"]
        )
