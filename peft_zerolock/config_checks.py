"""What ZeroLockConfig refuses: each error names the value, the range and the remedy."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ZeroLockConfig

READOUTS = ("auto", "lm_head", "adapter", "bottleneck", "vocab", "blocks")
CLASSIFICATION_TASKS = ("SEQ_CLS", "TOKEN_CLS")
_INITS_THAT_LEAVE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")


def check_settings(config: "ZeroLockConfig") -> None:
    """Refuses settings that are out of their range or do not go together.

    Raises:
        ValueError: with the value, the range and the remedy.
    """
    _check_chunks(config)
    _check_ranges(config)
    _check_readout(config)
    _check_train_chunks(config)
    _check_control(config)


def _check_chunks(config: "ZeroLockConfig") -> None:
    sizes, count = config.chunk_sizes, config.num_chunks
    if sizes is not None:
        if not isinstance(sizes, list) or not sizes or any(not _is_int(n) or n < 1 for n in sizes):
            raise ValueError(
                f"chunk_sizes={sizes!r}: each chunk needs at least one block. Give a list of positive whole "
                "numbers that add up to the model's number of blocks, such as [8, 7, 7]."
            )
        if count is not None and count != len(sizes):
            raise ValueError(
                f"num_chunks={count} and chunk_sizes={sizes!r} ({len(sizes)} chunks) disagree: give one of them."
            )
    _check(config, "num_chunks", count is None or (_is_int(count) and count >= 1), "a whole number >= 1")


def _check_ranges(config: "ZeroLockConfig") -> None:
    """Each field by itself."""
    ranges: dict[str, tuple[Any, str]] = {
        "alpha": (_is_number(config.alpha) and 0 < config.alpha <= 1, "in (0, 1]; 1 = the task term alone"),
        "consistency": (config.consistency in ("forward", "reverse"), "'forward' or 'reverse'"),
        "consistency_first": (isinstance(config.consistency_first, bool), "True or False"),
        "readout": (config.readout in READOUTS, f"one of {', '.join(map(repr, READOUTS))}"),
        "readout_dim": (
            config.readout_dim is None or (_is_int(config.readout_dim) and config.readout_dim >= 1),
            "a whole number >= 1, or None for the readout's own default",
        ),
        "readout_blocks": (
            _is_reach(config.readout_blocks),
            "a whole number >= 0, a share of the later blocks in (0, 1), or 'all'",
        ),
        "readout_weights": (config.readout_weights in ("own", "current"), "'own' or 'current'"),
        "readout_rows": (
            config.readout_rows == "auto" or (_is_number(config.readout_rows) and 0 < float(config.readout_rows) <= 1),
            "a share of the rows in (0, 1], or 'auto'",
        ),
        "readout_blocks_from": (
            config.readout_blocks_from in ("auto", "even", "next", "last"),
            "auto, even, next or last",
        ),
        "readout_learning_rate": (
            config.readout_learning_rate is None
            or (_is_number(config.readout_learning_rate) and config.readout_learning_rate > 0),
            "greater than 0, or None for the adapters' learning rate",
        ),
        "readout_warmup_ratio": (
            _is_number(config.readout_warmup_ratio) and 0 <= config.readout_warmup_ratio < 1,
            "in [0, 1); 0 = no warm-up",
        ),
        "logits_slice": (
            config.logits_slice is None or (_is_int(config.logits_slice) and config.logits_slice >= 1),
            "a whole number of tokens >= 1, or None for the model's own unsliced loss",
        ),
        "objective": (config.objective in ("task", "reconstruction"), "'task' or 'reconstruction'"),
        "control": (isinstance(config.control, bool), "True or False"),
    }
    for name, (valid, allowed) in ranges.items():
        _check(config, name, valid, allowed)


def _check_readout(config: "ZeroLockConfig") -> None:
    vocab = config.readout_vocab
    if config.objective == "reconstruction" and (config.readout != "auto" or config.readout_weights == "current"):
        raise ValueError(
            f"objective='reconstruction' has a decoder in place of a readout, got readout={config.readout!r} and "
            f"readout_weights={config.readout_weights!r}: leave them at 'auto' and 'own', or use objective='task'."
        )
    if vocab is not None and config.readout != "vocab":
        raise ValueError(f"readout_vocab={vocab!r} belongs to readout='vocab', got readout={config.readout!r}.")
    if isinstance(vocab, list):
        _check(config, "readout_vocab", vocab and all(_is_int(t) and t >= 0 for t in vocab), "token ids >= 0")
    elif vocab is not None:
        _check(config, "readout_vocab", _is_int(vocab) and vocab >= 1, "token ids, or how many to take (>= 1)")
    if config.readout in ("bottleneck", "vocab"):
        if config.task_type in CLASSIFICATION_TASKS:
            raise ValueError(
                f"readout={config.readout!r} replaces a language-model head and does not fit "
                f"task_type={config.task_type!r}: use 'auto', 'lm_head', 'adapter' or 'blocks'."
            )
        if config.logits_slice is None:
            raise ValueError(
                f"readout={config.readout!r} needs the sliced loss, got logits_slice=None: give a number of tokens."
            )
    plain_start = config.init_lora_weights in _INITS_THAT_LEAVE_THE_BASE
    if config.resolved_readout == "blocks" and config.readout_dim not in (None, config.r) and not plain_start:
        raise ValueError(
            f"readout_dim={config.readout_dim} with init_lora_weights={config.init_lora_weights!r}: this start moves "
            "a part of rank r of the base weights into the adapters, so the readout's need that rank too. Use "
            f"readout_dim={config.r} or None."
        )
    _check_own_parameters(config)


def _check_own_parameters(config: "ZeroLockConfig") -> None:
    """Settings of a readout's own parameters need a readout that has some."""
    current = config.readout_weights == "current"
    if current and config.resolved_readout != "blocks":
        raise ValueError(
            f"readout_weights='current' belongs to readout='blocks', got readout={config.readout!r}: leave it at "
            "'own'."
        )
    if current and config.readout_dim is not None:
        raise ValueError(
            f"readout_dim={config.readout_dim}: with readout_weights='current' the readout has no LoRA of its own. "
            "Leave readout_dim out, or use readout_weights='own'."
        )
    bare = config.resolved_readout == "lm_head" or (config.resolved_readout == "blocks" and config.readout_blocks == 0)
    frozen = current or (bare and config.task_type not in CLASSIFICATION_TASKS)
    if config.readout_warmup_ratio > 0 and frozen:
        raise ValueError(
            f"readout_warmup_ratio={config.readout_warmup_ratio}: this readout has no parameters of its own to warm "
            "up. Use readout='adapter' or 'bottleneck', or 'blocks' with readout_weights='own' and at least one "
            "block, or a ratio of 0."
        )


def _check_train_chunks(config: "ZeroLockConfig") -> None:
    chosen, count = config.train_chunks, config.resolved_num_chunks
    if chosen is None:
        return
    allowed = [n for n in range(-count, count + 1) if n != 0]
    if not isinstance(chosen, list) or not chosen or any(not _is_int(n) or n not in allowed for n in chosen):
        raise ValueError(
            f"train_chunks={chosen!r}: the model has {count} chunk(s); name at least one of them by its number, "
            f"1 to {count}, or from the end, -1 to -{count}."
        )


def _check_control(config: "ZeroLockConfig") -> None:
    """The control is the last chunk only: there must be more than that to compare with it."""
    count, trained = config.resolved_num_chunks, config.trained_chunks
    if config.control and (count - 1 not in trained or len(trained) < 2):
        raise ValueError(
            f"control=True compares all chunks with the last one only, but of {count} chunk(s) those that learn are "
            f"{sorted(k + 1 for k in trained)}: train the last one and at least one below it, or leave control out."
        )


def _check(config: "ZeroLockConfig", name: str, valid: Any, allowed: str) -> None:
    if not valid:
        raise ValueError(f"{name}={getattr(config, name)!r} is not valid: it must be {allowed}.")


def _is_reach(value: Any) -> bool:
    is_share = isinstance(value, float) and 0 < value < 1
    return value == "all" or is_share or (_is_int(value) and int(value) >= 0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
