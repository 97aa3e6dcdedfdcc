"""What a training run writes and reads: complete checkpoints, or none."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from .config import CONFIG_NAME, ZeroLockConfig

logger = logging.get_logger(__name__)

MARKER_NAME = "zerolock_complete.json"
READOUTS_NAME = "readouts.safetensors"
CONTROL_NAME = "control.safetensors"
_LORA_SETTINGS = (
    *("r", "lora_alpha", "target_modules", "modules_to_save", "layers_to_transform", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "lora_bias", "bias", "trainable_token_indices"),
)
_WITHOUT_ORDER = ("target_modules", "modules_to_save", "layers_to_transform")
_NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", READOUTS_NAME)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@contextmanager
def staged(run_dir: str, name: str, writes: bool = True, wait: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Gives a temporary run folder; on success, what was written to `name` in it becomes `run_dir/name`.

    The new folder gets a marker that it is complete, then its name. A crash at any moment leaves either what was
    there before or the complete new folder, never a mixture; what a killed process leaves is cleared up here and in
    `newest_complete`.

    Args:
        writes: whether this process makes the folders and gives them their names; one of several does.
        wait: returns when every process has come here.
    """
    temporary = Path(run_dir, f"_{name}.incomplete")
    target = Path(run_dir, name)
    if writes:
        clear_leftovers(run_dir)
        temporary.mkdir(parents=True)
    wait()
    try:
        yield str(temporary)
        wait()
        if writes:
            _write_marker(temporary / name)
            if target.exists():
                os.replace(target, temporary / "replaced")
            os.replace(temporary / name, target)
    finally:
        if writes:
            clear_leftovers(run_dir)
    wait()


def clear_leftovers(run_dir: str) -> None:
    """Removes the temporary folders of saves that did not end, after putting a checkpoint back in its place."""
    for temporary in Path(run_dir).glob("_checkpoint-*.incomplete"):
        name = temporary.name[1:].removesuffix(".incomplete")
        target = Path(run_dir, name)
        for made in (temporary / name, temporary / "replaced"):
            if made.is_dir() and not target.exists() and (made.name == "replaced" or fault_of(str(made)) is None):
                os.replace(made, target)
        shutil.rmtree(temporary)


@contextmanager
def replaced_files(folder: str) -> Iterator[str]:
    """Gives a temporary folder; on success, the files written to it replace those of the same names in `folder`."""
    target = Path(folder)
    temporary = target / "_saving"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        card = target / "README.md"
        if card.exists():
            shutil.copy(card, temporary / card.name)
        yield str(temporary)
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                final = target / path.relative_to(temporary)
                final.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, final)
    finally:
        shutil.rmtree(temporary)


def _write_marker(folder: Path) -> None:
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    with open(folder / MARKER_NAME, "w", encoding="utf-8") as file:
        json.dump({"files": files}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def fault_of(folder: str) -> str | None:
    """Why a checkpoint is not complete, in words; None if it is."""
    root = Path(folder)
    try:
        recorded = json.loads((root / MARKER_NAME).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in recorded.items()}
    except FileNotFoundError:
        return f"it has no {MARKER_NAME}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MARKER_NAME} is damaged"
    for name, (size, digest) in expected.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _digest(path) != digest:
            return f"{name} has been changed"
    absent = [name for name in _NEEDED if name not in expected]
    absent += [] if {"rng_state.pth", "rng_state_0.pth"} & set(expected) else ["rng_state.pth"]
    if absent:
        return f"it has no {', '.join(absent)} (save_only_model=True leaves them out)"
    return None


def newest_complete(output_dir: str) -> str:
    """The newest complete checkpoint of a run; says which newer ones it passes over and why.

    Raises:
        ValueError: there is none.
    """
    found = {}
    clear_leftovers(output_dir)
    if os.path.isdir(output_dir):
        for name in os.listdir(output_dir):
            match = _CHECKPOINT.fullmatch(name)
            if match and os.path.isdir(os.path.join(output_dir, name)):
                found[int(match[1])] = os.path.join(output_dir, name)
    faults: list[str] = []
    for step in sorted(found, reverse=True):
        fault = fault_of(found[step])
        if fault is None:
            if faults:
                logger.warning(f"Resuming from {found[step]}, the newest complete checkpoint. Passed over: {faults}.")
            return found[step]
        faults.append(f"{os.path.basename(found[step])}: {fault}")
    told = f" Passed over: {'; '.join(faults)}." if faults else ""
    raise ValueError(
        f"resume_from_checkpoint=True, but {output_dir!r} has no complete checkpoint.{told} Start afresh without "
        "resume_from_checkpoint, or give another output_dir."
    )


def check_resumable(folder: str, config: ZeroLockConfig) -> None:
    """Refuses a checkpoint that is damaged or was trained with other chunk settings.

    Raises:
        ValueError: with what is wrong and what to do.
    """
    fault = fault_of(folder)
    if fault is not None:
        raise ValueError(
            f"{folder!r} is not a complete checkpoint: {fault}. Resume from an older one, or with "
            "resume_from_checkpoint=True from the newest complete one."
        )
    saved = _settings(ZeroLockConfig.from_pretrained(_adapter_folder(folder)))
    changed = {name: (saved[name], value) for name, value in _settings(config).items() if saved[name] != value}
    if changed:
        told = ", ".join(f"{name}: {old!r} there, {new!r} now" for name, (old, new) in changed.items())
        raise ValueError(
            f"{folder!r} was trained with other settings ({told}). Resume with the settings that it was trained "
            f"with (ZeroLockConfig.from_pretrained reads them; set inference_mode=False on it), or start afresh."
        )


def _adapter_folder(checkpoint: str) -> str:
    """PEFT saves an adapter in a folder of its name, unless its name is "default"."""
    inside = sorted(path.parent for path in Path(checkpoint).glob(f"*/{CONFIG_NAME}"))
    return checkpoint if Path(checkpoint, CONFIG_NAME).is_file() or not inside else str(inside[0])


def _settings(config: ZeroLockConfig) -> dict[str, Any]:
    """What must not change between the halves of a run; what has no order is sorted, each value once."""
    values = config.chunk_settings() | {name: getattr(config, name) for name in _LORA_SETTINGS}
    for name in ("num_chunks", "chunk_sizes", "logits_slice"):
        del values[name]
    values["num_chunks, chunk_sizes"] = (config.resolved_num_chunks, config.chunk_sizes)
    for name in _WITHOUT_ORDER:
        if isinstance(values[name], list | tuple | set):
            values[name] = sorted(set(values[name]))  # PEFT names the heads of a classifier again at each loading
    return values


def save_tensors(folder: str, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes to the file `name` what is not part of the adapter but needed for resuming."""
    save_file({key: t.detach().contiguous().cpu() for key, t in tensors.items()}, os.path.join(folder, name))


def read_tensors(folder: str, name: str) -> dict[str, Tensor]:
    """What `save_tensors` wrote."""
    return load_file(os.path.join(folder, name))


def load_tensors(folder: str, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Reads it back in place.

    Raises:
        ValueError: the file has other tensors.
    """
    saved = read_tensors(folder, name)
    if {key: t.shape for key, t in saved.items()} != {key: t.shape for key, t in tensors.items()}:
        raise ValueError(f"{name} in {folder!r} does not fit this model and these chunk settings; start afresh.")
    for key, tensor in tensors.items():
        tensor.data.copy_(saved[key])
