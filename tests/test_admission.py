"""What cannot be trained chunk by chunk is refused in one clear error, and left as it was."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from zoo import GEMMA, SMALL, lora_arguments, make_model

from peft_zerolock import UnsupportedModelError, ZeroLockConfig, ZeroLockTrainer
from peft_zerolock.blocks import find_blocks
from peft_zerolock.staging import build_stages, dissect


def _t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    )


def _bart():
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=64, d_model=16, **sizes, **heads))


def _gemma3n():
    config = hf.Gemma3nTextConfig(
        **(GEMMA | {"num_hidden_layers": 4, "intermediate_size": [32] * 4, "vocab_size_per_layer_input": 64}),
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return hf.Gemma3nForCausalLM(config)


def _albert():
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(**(SMALL | {"embedding_size": 16})))


@pytest.mark.parametrize(
    ("make", "target", "reason"),
    [
        (_t5, "q", "T5ForConditionalGeneration .*encoder-decoder"),
        (_bart, "q_proj", "BartForConditionalGeneration .*encoder-decoder"),
        (_gemma3n, "q_proj", "Gemma3nForCausalLM cannot be trained chunk by chunk"),
        (_albert, "query", "AlbertForSequenceClassification .*no list of 3 blocks"),
        (lambda: make_model("opt", layerdrop=0.1), "q_proj", "OPTForCausalLM .*layerdrop=0.1"),
    ],
    ids=["t5", "bart", "gemma3n", "albert", "layerdrop"],
)
def test_refused_in_one_line_and_unchanged(tmp_path, make, target, reason):
    model = make()
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedModelError, match=reason) as refused:
        ZeroLockTrainer(
            model=model,
            args=hf.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]),
            peft_config=ZeroLockConfig(target_modules=[target], num_chunks=2),
        )
    assert "\n" not in str(refused.value)
    assert [type(m) for m in model.modules()] == classes
    assert {name for name, _ in model.named_parameters()} == before.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.requires_grad == before[name][1]


def test_more_chunks_than_blocks_is_refused_before_wrapping(tmp_path):
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"num_chunks=4: the model has 3 block"):
        ZeroLockTrainer(
            model=model,
            args=hf.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]),
            peft_config=ZeroLockConfig(**lora_arguments("llama"), num_chunks=4),
        )
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_expert_lists_are_not_taken_for_the_block_list():
    model = make_model("mixtral", num_local_experts=3)
    assert find_blocks(model) is model.model.layers
    assert find_blocks(make_model("llama", "BARE")) is not None


def test_a_new_head_that_would_not_be_saved_is_refused():
    config = ZeroLockConfig(**lora_arguments("deberta", "SEQ_CLS", modules_to_save=None), num_chunks=2)
    model = get_peft_model(make_model("deberta", "SEQ_CLS"), config)
    with pytest.raises(ValueError, match=r"pooler.dense.weight.*modules_to_save=\['pooler'\]"):
        dissect(model, config)


def test_the_dry_run_leaves_modes_and_flags_alone():
    model = get_peft_model(make_model("llama"), ZeroLockConfig(**lora_arguments("llama"), num_chunks=2))
    model.train()
    model.base_model.model.model.norm.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    dissect(model, model.peft_config["default"])
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert model.config.use_cache is True


@pytest.mark.parametrize("wrong", ["plain", "lora", "nested"])
def test_other_models_are_refused_with_the_remedy(tmp_path, wrong):
    args = hf.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    model = make_model("llama")
    if wrong == "plain":
        with pytest.raises(ValueError, match="LlamaForCausalLM: ZeroLockTrainer trains a PeftModel"):
            ZeroLockTrainer(model=model, args=args)
    elif wrong == "lora":
        with pytest.raises(ValueError, match="has a LoraConfig: chunk settings are missing"):
            ZeroLockTrainer(model=get_peft_model(model, LoraConfig(**lora_arguments("llama"))), args=args)
    else:
        inner = get_peft_model(model, ZeroLockConfig(**lora_arguments("llama")))
        with pytest.warns(UserWarning):
            outer = get_peft_model(inner, ZeroLockConfig(**lora_arguments("llama")))
        with pytest.raises(ValueError, match="PeftModel inside a PeftModel"):
            ZeroLockTrainer(model=outer, args=args)


def test_readouts_that_do_not_fit_the_model_are_refused_before_training():
    config = ZeroLockConfig(**lora_arguments("opt_projected"), num_chunks=2, readout="bottleneck")
    model = get_peft_model(make_model("opt_projected"), config)
    with pytest.raises(ValueError, match="the head reads 8 features and the blocks have 16: use 'blocks'"):
        build_stages(model, config, sliced=True)
    config = ZeroLockConfig(**lora_arguments("llama"), num_chunks=2, readout="vocab", readout_vocab=[1, 9999])
    model = get_peft_model(make_model("llama"), config)
    with pytest.raises(ValueError, match="token ids from 0 to 63"):
        build_stages(model, config, sliced=True, vocab=torch.tensor([1, 9999]))
