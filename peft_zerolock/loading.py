"""Puts a saved adapter on a base model, after checking that both have the same blocks."""

import os
import re
from typing import Any

from huggingface_hub import hf_hub_download
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import nn

from .blocks import find_blocks
from .config import ZeroLockConfig


def load_adapter(
    base_model: nn.Module, folder: str, is_trainable: bool = False, subfolder: str | None = None, **kwargs: Any
) -> PeftModel:
    """Loads an adapter with its chunk settings, ready for ZeroLockTrainer where `is_trainable`.

    The same as `PeftModel.from_pretrained` for an adapter that fits; PEFT leaves out silently what does not.

    Args:
        base_model: a transformers model without adapters.
        folder: where the adapter was saved, or a Hub repository.
        is_trainable: load it for further training.
        kwargs: as in `PeftModel.from_pretrained`.

    Raises:
        ValueError: the base model already has adapters, or another number of blocks than the one that the adapter
            was trained on; it is not changed.
    """
    if isinstance(base_model, PeftModel) or any(isinstance(m, BaseTunerLayer) for m in base_model.modules()):
        raise ValueError(
            "The model already has adapters, and another one would nest: give the base model, or merge first "
            "(model = model.merge_and_unload())."
        )
    config = ZeroLockConfig.from_pretrained(folder, subfolder=subfolder, **kwargs)
    _check_depth(base_model, config, folder, _blocks_with_weights(base_model, folder, subfolder, kwargs))
    if subfolder is not None:
        kwargs["subfolder"] = subfolder
    return PeftModel.from_pretrained(base_model, folder, is_trainable=is_trainable, config=config, **kwargs)


def _block_path(base: nn.Module) -> re.Pattern[str]:
    blocks = find_blocks(base)
    name = next(name for name, module in base.named_modules() if module is blocks)
    return re.compile(rf"(?:^|\.){re.escape(name)}\.(\d+)\.")


def _blocks_with_weights(base: nn.Module, folder: str, subfolder: str | None, kwargs: dict[str, Any]) -> set[int]:
    path = os.path.join(folder, subfolder or "", SAFETENSORS_WEIGHTS_NAME)
    if not os.path.isdir(folder):
        hub = {key: kwargs[key] for key in ("cache_dir", "revision", "token", "local_files_only") if key in kwargs}
        path = hf_hub_download(folder, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **hub)
    if not os.path.isfile(path):
        raise ValueError(f"{folder!r} has no {SAFETENSORS_WEIGHTS_NAME}: give the folder in which the adapter is.")
    pattern = _block_path(base)
    with safe_open(path, framework="pt") as file:
        # Biases and saved modules are those of other blocks too.
        keys = [key for key in file.keys() if "lora_" in key]
    return {int(match[1]) for key in keys if (match := pattern.search(key))}


def _targets(base: nn.Module, config: ZeroLockConfig) -> list[str]:
    """Names of the base model's modules and parameters that would get adapters; none where only PEFT can tell."""
    names = []
    if config.target_modules not in (None, "all-linear"):
        names += [name for name, _ in base.named_modules() if check_target_module_exists(config, name)]
    ends = tuple(f".{target}" for target in config.target_parameters or ())
    return names + [name for name, _ in base.named_parameters() if f".{name}".endswith(ends)]


def _check_depth(base: nn.Module, config: ZeroLockConfig, folder: str, found: set[int]) -> None:
    pattern = _block_path(base)
    expected = {int(match[1]) for name in _targets(base, config) if (match := pattern.search(name))}
    count = len(find_blocks(base))
    deepest = max(found, default=-1)
    fits = deepest == max(expected) if expected else deepest < count
    if config.chunk_sizes is not None:
        depth, known = sum(config.chunk_sizes), "of"
        fits = fits and depth == count
    else:
        depth, known = deepest + 1, "of (at least)"
    if not fits:
        needed = f" and would need {sorted(expected)}" if expected else ""
        raise ValueError(
            f"The adapter in {folder!r} was trained on a model {known} {depth} blocks, but {type(base).__name__} has "
            f"{count}: it has weights for blocks {sorted(found)}{needed}. Load the base model that it was trained on "
            "(base_model_name_or_path in adapter_config.json)."
        )
