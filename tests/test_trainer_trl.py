"""ZeroLockMixin with TRL's SFTTrainer, which patches the model's forward and has a loss of its own."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from training import largest_difference, weights
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from zoo import lora_arguments, make_model

from peft_zerolock import ZeroLockConfig, ZeroLockMixin


class ZeroLockSFTTrainer(ZeroLockMixin, SFTTrainer):
    pass


def _make(tmp_path, trainer_class, config):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    rows = {"prompt": ["w4 w5 w6"] * 8 + ["w7 w8"] * 8, "completion": [" w9 w10", " w11"] * 8}
    args = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    return trainer_class(
        model=make_model("llama"),
        args=args,
        peft_config=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
    )


def test_one_chunk_is_sft(tmp_path):
    stock = _make(tmp_path, SFTTrainer, LoraConfig(**lora_arguments("llama")))
    ours = _make(tmp_path, ZeroLockSFTTrainer, ZeroLockConfig(**lora_arguments("llama"), num_chunks=1))
    with torch.no_grad():
        for name, start in weights(stock).items():
            ours.model.get_parameter(name).copy_(start)
    stock.train()
    ours.train()
    assert largest_difference(weights(stock), weights(ours)) == 0.0


@pytest.mark.parametrize("readout", ["lm_head", "adapter", "blocks"])
def test_chunks_learn_and_sft_s_metrics_are_logged(tmp_path, readout):
    config = ZeroLockConfig(**lora_arguments("llama"), num_chunks=3, readout=readout, readout_rows=1.0)
    trainer = _make(tmp_path, ZeroLockSFTTrainer, config)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["loss"] == pytest.approx(row["loss/chunk_3"], abs=1e-5)
    assert 3.5 < row["loss/chunk_1"] < 5.0
    assert row["num_tokens"] > 0
    assert all(p.abs().sum() > 0 for n, p in weights(trainer).items() if "lora_B" in n)
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists()
