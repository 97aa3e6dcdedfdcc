"""Tiny random models of the real classes, and tiny data: nothing here stands in for the library's own code."""

from typing import Any

import torch
import transformers as hf
from torch.utils.data import Dataset

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 1}
GEMMA = GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
DEBERTA = SMALL | {
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "type_vocab_size": 0,
}
OPT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layerdrop": 0.0,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda **kw: hf.LlamaConfig(**(GROUPED | kw)),
    "qwen2": lambda **kw: hf.Qwen2Config(**(GROUPED | kw)),
    "qwen3": lambda **kw: hf.Qwen3Config(**(GROUPED | {"head_dim": 8} | kw)),
    "mistral": lambda **kw: hf.MistralConfig(**(GROUPED | {"sliding_window": 4} | kw)),
    "gemma2": lambda **kw: hf.Gemma2Config(**(GEMMA | {"final_logit_softcapping": 30.0} | kw)),
    "gemma3": lambda **kw: hf.Gemma3TextConfig(**(GEMMA | kw)),
    "phi3": lambda **kw: hf.Phi3Config(**(GROUPED | kw)),
    "gpt2": lambda **kw: hf.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=64, pad_token_id=0, **kw
    ),
    "gpt_neox": lambda **kw: hf.GPTNeoXConfig(**(SMALL | kw)),
    "opt": lambda **kw: hf.OPTConfig(**(OPT | kw)),
    "opt_projected": lambda **kw: hf.OPTConfig(
        **(OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False} | kw)
    ),
    "mixtral": lambda **kw: hf.MixtralConfig(**(GROUPED | {"num_local_experts": 4} | kw)),
    "bert": lambda **kw: hf.BertConfig(**(SMALL | kw)),
    "roberta": lambda **kw: hf.RobertaConfig(**(SMALL | {"max_position_embeddings": 66} | kw)),
    "distilbert": lambda **kw: hf.DistilBertConfig(
        vocab_size=64, dim=16, n_layers=3, n_heads=2, hidden_dim=32, max_position_embeddings=64, pad_token_id=0, **kw
    ),
    "deberta": lambda **kw: hf.DebertaV2Config(**(DEBERTA | kw)),
}
DECODERS = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"),
    *("gpt2", "gpt_neox", "opt", "opt_projected", "mixtral"),
]
ENCODERS = ["bert", "roberta", "distilbert", "deberta"]
CLASSES = {
    "CAUSAL_LM": hf.AutoModelForCausalLM,
    "SEQ_CLS": hf.AutoModelForSequenceClassification,
    "TOKEN_CLS": hf.AutoModelForTokenClassification,
    "BARE": hf.AutoModel,
}
TARGETS = {
    "gpt2": ["c_attn"],
    "gpt_neox": ["query_key_value"],
    "opt": ["q_proj", "v_proj"],
    "opt_projected": ["q_proj", "v_proj"],
    "phi3": ["qkv_proj"],
    "distilbert": ["q_lin", "v_lin"],
    "deberta": ["query_proj", "value_proj"],
    "bert": ["query", "value"],
    "roberta": ["query", "value"],
}
EXTRA_MODULES = {"deberta": ["pooler", "classifier"], "distilbert": ["pre_classifier", "classifier"]}


def make_model(name: str, task: str = "CAUSAL_LM", seed: int = 0, **overrides: Any) -> hf.PreTrainedModel:
    """A tiny random model, in evaluation mode, without dropout unless `overrides` sets it."""
    torch.manual_seed(seed)
    config = CONFIGS[name](**overrides)
    for key in list(vars(config)):
        if "drop" in key and key not in overrides and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    if task in ("SEQ_CLS", "TOKEN_CLS") and "num_labels" not in overrides:
        config.num_labels = 3
    return CLASSES[task].from_config(config).eval()


def lora_arguments(name: str, task: str = "CAUSAL_LM", **overrides: Any) -> dict[str, Any]:
    """LoraConfig arguments that fit a model of the zoo."""
    arguments: dict[str, Any] = {
        "task_type": None if task == "BARE" else task,
        "r": 4,
        "lora_alpha": 8,
        "target_modules": TARGETS.get(name, ["q_proj", "v_proj"]),
    }
    if task == "SEQ_CLS" and name in EXTRA_MODULES:
        arguments["modules_to_save"] = EXTRA_MODULES[name]
    return arguments | overrides


class Rows(Dataset):
    """A list of feature dictionaries as a data set."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def token_rows(number: int, lengths: tuple[int, ...] = (8, 5, 12, 7), seed: int = 0, prompt: int = 2) -> Rows:
    """Causal LM rows of uneven lengths; the first `prompt` tokens of each are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(number):
        ids = torch.randint(3, 64, (lengths[i % len(lengths)],), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return Rows(rows)


def class_rows(number: int, num_labels: int = 3, seed: int = 0, regression: bool = False) -> Rows:
    """Sequence classification rows of uneven lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(number):
        ids = torch.randint(3, 64, ((8, 5, 12, 7)[i % 4],), generator=generator).tolist()
        label = float(i % 5) if regression else i % num_labels
        rows.append({"input_ids": ids, "label": label})
    return Rows(rows)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads on the right with 0, labels with -100; `label` becomes `labels`."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    if "label" in rows[0]:
        labels = torch.tensor([row["label"] for row in rows])
    else:
        labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
