"""The default LoRA targets, the longest row, newly initialised modules; whether a model writes from left to right."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from peft_zerolock.admission import evaluation_mode
from peft_zerolock.blocks import base_model_of, find_blocks


def check_length(name: str, max_length: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses rows longer than the model has positions or its tokenizer allows.

    Raises:
        ValueError: ``max_length`` is larger.
    """
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    limit = min(limit for limit in limits if limit and limit > 0)
    if max_length > limit:
        raise ValueError(f"max_length={max_length}, but {name} takes {limit} tokens at most.")


@torch.no_grad()
def check_causal(name: str, model: PreTrainedModel) -> None:
    """Refuses a model whose logits depend on later tokens: it would learn to copy them and could not write a text.

    Raises:
        ValueError: it is no causal language model, such as BERT behind a head for language modelling.
    """
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]], device=model.device) % model.config.get_text_config().vocab_size
    with evaluation_mode(model):
        one, other = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :2].float()
    if not torch.allclose(one, other, atol=1e-4 * float(one.abs().max())):
        raise ValueError(
            f"{name} ({type(model).__name__}) reads later tokens too: it is an encoder, not a causal language model. "
            "Choose a decoder here; recipes/glue.py trains encoders."
        )


def block_linears(model: nn.Module) -> list[str]:
    """Names of all linear layers inside the blocks, for ``target_modules``: embeddings, pooler and head stay out.

    Names are relative to a block ("attention.self.query"), or complete where such an ending also fits a module
    outside the blocks.

    Raises:
        ValueError: the model has no list of blocks, or no linear layer in it.
    """
    blocks = find_blocks(model)
    modules = dict(base_model_of(model).named_modules())
    inside = {id(part) for block in blocks for part in block.modules()}
    linear = {
        name: part for block in blocks for name, part in block.named_modules() if isinstance(part, (nn.Linear, Conv1D))
    }
    if not linear:
        raise ValueError(f"{type(model).__name__} has no linear layer in its blocks. Pass --target_modules.")
    names = set()
    for ending in linear:
        matches = {name: part for name, part in modules.items() if name == ending or name.endswith(f".{ending}")}
        if all(id(part) in inside for part in matches.values()):
            names.add(ending)
        else:
            names |= {name for name, part in matches.items() if id(part) in inside}
    return sorted(names)


def new_modules(model: nn.Module, missing_keys: Iterable[str]) -> list[str]:
    """Modules beside the blocks that ``from_pretrained`` had to initialise: they must be trained and saved whole.

    Args:
        model: the model as loaded.
        missing_keys: ``missing_keys`` of ``from_pretrained(..., output_loading_info=True)``.

    Returns:
        Names for ``modules_to_save``: the outermost module of each key that does not hold the blocks ("pooler",
        "classifier").

    Raises:
        ValueError: weights inside the blocks, or of no module, are missing: the checkpoint is of another kind.
    """
    blocks = find_blocks(model)
    holders = {name for name, part in model.named_modules() if any(child is blocks for child in part.modules())}
    blocks_name = max(holders, key=len)
    own_names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    found, lost = set(), []
    for key in sorted(set(missing_keys) & own_names):
        parts = key.split(".")
        paths = [".".join(parts[:stop]) for stop in range(1, len(parts))]
        outermost = next((path for path in paths if path not in holders), None)
        if key.startswith(f"{blocks_name}.") or outermost is None:
            lost.append(key)
        else:
            found.add(outermost.rpartition(".")[2])
    if lost:
        raise ValueError(
            f"the checkpoint lacks {len(lost)} weights of {type(model).__name__} ({', '.join(lost[:3])} ...): they "
            "would stay random and frozen. Load a checkpoint of this architecture."
        )
    return sorted(found)
