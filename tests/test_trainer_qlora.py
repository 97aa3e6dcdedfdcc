"""QLoRA: a base in 4 bits by bitsandbytes, on the CPU."""

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from training import arguments, largest_difference, weights
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer
from zoo import collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    make_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(path)
    return str(path)


def _train(folder, tmp_path, config):
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = prepare_model_for_kbit_training(AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits))
    assert type(base.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    torch.manual_seed(1)
    trainer = (ZeroLockTrainer if isinstance(config, ZeroLockConfig) else Trainer)(
        model=get_peft_model(base, config),
        args=arguments(tmp_path),
        train_dataset=token_rows(24),
        data_collator=collate,
    )
    before = weights(trainer)
    trainer.train()
    return before, weights(trainer)


def test_one_chunk_is_stock(folder, tmp_path):
    _, stock = _train(folder, tmp_path, LoraConfig(**lora_arguments("llama")))
    _, ours = _train(folder, tmp_path, ZeroLockConfig(**lora_arguments("llama"), num_chunks=1, logits_slice=None))
    assert largest_difference(stock, ours) == 0.0


@pytest.mark.parametrize("readout", ["lm_head", "adapter", "bottleneck", "vocab", "blocks"])
def test_every_chunk_learns(folder, tmp_path, readout):
    config = ZeroLockConfig(**lora_arguments("llama"), num_chunks=3, readout=readout)
    before, after = _train(folder, tmp_path, config)
    assert all(not torch.equal(before[n], after[n]) for n in after if "lora_B" in n)


def test_weights_in_8_bits_are_shared_by_all_views(folder, tmp_path):
    bits = BitsAndBytesConfig(load_in_8bit=True)
    base = prepare_model_for_kbit_training(AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits))
    config = ZeroLockConfig(**lora_arguments("llama"), num_chunks=3)
    trainer = ZeroLockTrainer(
        model=get_peft_model(base, config),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=token_rows(24),
        data_collator=collate,
    )
    trainer.train()
    trees = [trainer.model, *(stage.view.module for stage in trainer.stages)]
    layers = [[m for m in tree.modules() if type(m) is bitsandbytes.nn.Linear8bitLt] for tree in trees]
    assert [len(found) for found in layers] == [21, 21, 14, 7]  # a chunk's block, and two, one or none of its readout
    own = {layer.state.CB.data_ptr() for layer in layers[0] if layer.state.CB is not None}
    shared = {layer.state.CB.data_ptr() for found in layers[1:] for layer in found if layer.state.CB is not None}
    assert shared and shared <= own
