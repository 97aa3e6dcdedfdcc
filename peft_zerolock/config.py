"""ZeroLockConfig: a LoraConfig that also says how the model is cut into chunks and what each chunk learns."""

import json
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import LoraConfig
from transformers.utils import logging

from .config_checks import CLASSIFICATION_TASKS, READOUTS, check_settings

logger = logging.get_logger(__name__)

CONFIG_NAME = "zerolock_config.json"


@dataclass
class ZeroLockConfig(LoraConfig):
    """Configuration of a LoRA adapter that is trained chunk by chunk with local losses (ZeroLock, arXiv 2608.07974).

    Every option of [`peft.LoraConfig`] keeps its meaning, and what is saved is a plain LoRA adapter: the fields below
    go into a file of their own (`zerolock_config.json`) that plain PEFT does not read.

    Args:
        num_chunks (`int`, *optional*): Into how many chunks of (nearly) equal size the blocks are split; 2 where
            neither this nor `chunk_sizes` is given. 1 is ordinary backpropagation.
        chunk_sizes (`list[int]`, *optional*): The number of blocks in each chunk, first to last, in place of
            `num_chunks`.
        train_chunks (`list[int]`, *optional*): Which chunks learn, counted from 1 to K (negative numbers count from
            the last). The others keep their adapters as they are and run without a graph. Default: all.
        alpha (`float`): Weight of the task term against the consistency term, in (0, 1]. With 1, the default, there is
            no consistency term and none of its cost. (Paper, "Local objective".)
        consistency (`str`): Direction of the consistency term. `"forward"` is the paper's KL(p_k || p_{k-1}),
            `"reverse"` is KL(p_{k-1} || p_k). p_{k-1} is the chunk's own readout of the hidden state it received,
            without gradient: for the static head exactly the paper's, and nothing but that state has to travel.
        consistency_first (`bool`): Whether chunk 1 has a consistency term too, against the readout of the embeddings.
        readout (`str`): What turns the hidden state after a chunk into logits (the last chunk always uses the
            model's own tail).

            - `"lm_head"`: the model's own tail (final norm and head), frozen; with a classification head, a trainable
              copy of the tail, thrown away after training.
            - `"adapter"`: a residual MLP of width `readout_dim`, the identity at the start, before that tail.
            - `"bottleneck"`: a low-rank projection of rank `readout_dim` in place of the head (causal LM only).
            - `"vocab"`: the tail restricted to the tokens of `readout_vocab` and the batch's labels (causal LM only).
            - `"blocks"`: `readout_blocks` of the later blocks, their base weights shared and frozen, each with a
              small LoRA of its own, then the tail (AugLocal, arXiv 2402.17318, made for LoRA).
            - `"auto"`: `"blocks"`.

            How the default was chosen (docs/quality.md; `python eval/report.py --results eval/results/quality_search`
            and `quality_first`): on SmolLM2-135M and AG News, all later blocks on half of the rows brought 2 chunks
            level with backpropagation, which the last 2 blocks and the bare tail had not; on MiniLM-L6 and SST-2 a
            LoRA of the readout's own did better than the later chunks' current weights. All of it with few seeds.
        readout_dim (`int`, *optional*): Width of the adapter (default 64), rank of the bottleneck (default 64), or
            rank of the readout blocks' LoRA (default: `r`).
        readout_blocks (`int`, `float` or `"all"`): Gradient reach: how many later blocks a readout of kind `"blocks"`
            runs through. A number (fewer where fewer are left; 0 is the tail alone, the paper's), a share of the
            later blocks in (0, 1) (rounded up), or `"all"`.
        readout_blocks_from (`str`): Which ones: `"even"` (sampled evenly from the rest, the last block included),
            `"next"`, `"last"`, or `"auto"`: even for SEQ_CLS and TOKEN_CLS, last otherwise.
        readout_weights (`str`): What a readout of kind `"blocks"` adapts those blocks, and the tail, with. `"own"`: a
            LoRA of its own (and, with a classification head, a copy of the tail), trained with the chunk's loss and
            thrown away; the chunk needs nothing from those after it. `"current"`: what the later chunks have learnt
            up to the last update window, frozen. With `readout_blocks="all"` the chunk's gradient is then
            backpropagation's.
        readout_rows (`float` or `"auto"`): On which share of the rows of an update window, in (0, 1], the chunks below
            the last take their local loss; the other rows only run forward there, without a graph. Which rows is
            settled by counting, not by chance. `"auto"`: as many as keep the activations of a chunk with its readout
            blocks within those of the chunk alone; where a micro-batch has too few rows for that, the readout blocks
            are checkpointed.
        readout_vocab (`int` or `list[int]`, *optional*): For `"vocab"`: the token ids, or how many of the most
            frequent label tokens of the training data (default 4096).
        readout_learning_rate (`float`, *optional*): Learning rate of the readouts' own parameters; default: the
            adapters'.
        readout_warmup_ratio (`float`): Share of the training steps, in [0, 1), in which only the readouts learn in
            chunks whose readout has parameters of its own.
        logits_slice (`int`, *optional*): For causal LMs, how many supervised tokens go through the head at a time:
            the extra memory is O(slice x vocabulary) whatever the batch. `None` uses the model's own loss on the
            full `(batch, seq, vocab)` logits. Slices of 32 or 64 tokens are slower, those
            above 256 take more memory for no clear gain (`python eval/costs/logits_slice.py`).
        objective (`str`): What the chunks below the last learn. `"task"`: the local objective. `"reconstruction"`: to
            keep what they were given, LoPT's feature reconstruction (arXiv 2605.04913): 10 times the mean squared
            error of a small decoder (width `readout_dim`, by default a quarter of the hidden size) of h_k
            against h_{k-1}. There is no readout then, and no consistency term, below the last chunk.
        control (`bool`): Trains "the last chunk only" (what `train_chunks=[-1]` would train) alongside, on the same
            micro-batches, logs its loss as `loss/control`, and at the end keeps it in place of all chunks where it
            is the better one. See `control.Control`, for its cost too.

    Raises:
        ValueError: a field is out of its range; the message names the value, the range and the remedy.
    """

    num_chunks: int | None = field(default=None, metadata={"help": "Number of chunks; 2 if chunk_sizes is not given."})
    chunk_sizes: list[int] | None = field(default=None, metadata={"help": "Blocks per chunk, first to last."})
    train_chunks: list[int] | None = field(
        default=None, metadata={"help": "Which chunks learn (1 to K); default: all."}
    )
    alpha: float = field(default=1.0, metadata={"help": "Weight of the task term in (0, 1]."})
    consistency: str = field(default="forward", metadata={"help": "'forward': KL(p_k || p_k-1); 'reverse'."})
    consistency_first: bool = field(default=True, metadata={"help": "Consistency term in chunk 1 too."})
    readout: str = field(default="auto", metadata={"help": f"One of {', '.join(READOUTS)}."})
    readout_dim: int | None = field(default=None, metadata={"help": "Width or rank of the readout."})
    readout_blocks: int | float | str = field(
        default="all", metadata={"help": "Later blocks in a readout of kind 'blocks': a number, a share, or 'all'."}
    )
    readout_blocks_from: str = field(default="auto", metadata={"help": "'even', 'next', 'last' or 'auto'."})
    readout_weights: str = field(default="own", metadata={"help": "'own' adapters of readout blocks, or 'current'."})
    readout_rows: float | str = field(default="auto", metadata={"help": "Share of rows with a local loss, or 'auto'."})
    readout_vocab: int | list[int] | None = field(default=None, metadata={"help": "Token ids or their number."})
    readout_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the readouts."})
    readout_warmup_ratio: float = field(default=0.0, metadata={"help": "Share of steps in which only readouts learn."})
    logits_slice: int | None = field(default=256, metadata={"help": "Supervised tokens per pass of the head."})
    objective: str = field(default="task", metadata={"help": "Of the lower chunks: 'task' or 'reconstruction'."})
    control: bool = field(default=False, metadata={"help": "Train the last chunk only alongside; keep the better."})

    def __post_init__(self):
        super().__post_init__()
        self.chunk_sizes, self.train_chunks = _as_list(self.chunk_sizes), _as_list(self.train_chunks)
        self.readout_vocab = _as_list(self.readout_vocab)
        check_settings(self)
        if isinstance(self.readout_vocab, list):
            self.readout_vocab = sorted(set(self.readout_vocab))

    @property
    def resolved_num_chunks(self) -> int:
        """K, the number of chunks that these settings ask for."""
        if self.chunk_sizes is not None:
            return len(self.chunk_sizes)
        return 2 if self.num_chunks is None else self.num_chunks

    @property
    def resolved_readout(self) -> str:
        """The kind of readout, with `"auto"` replaced by the default; `"decoder"` for the reconstruction objective."""
        if self.objective == "reconstruction":
            return "decoder"
        return "blocks" if self.readout == "auto" else self.readout

    @property
    def resolved_blocks_from(self) -> str:
        """Which later blocks a readout takes, with `"auto"` replaced by the task's default."""
        if self.readout_blocks_from != "auto":
            return self.readout_blocks_from
        return "even" if self.task_type in CLASSIFICATION_TASKS else "last"

    def reach(self, later: int) -> int:
        """How many of `later` later blocks a readout of kind `"blocks"` runs through."""
        asked: Any = self.readout_blocks
        if asked == "all":
            return later
        return min(later, math.ceil(asked * later) if isinstance(asked, float) else asked)

    def row_share(self, blocks: int, reach: int) -> float:
        """The share of rows with a local loss, for a chunk of `blocks` blocks whose readout has `reach` more."""
        return blocks / (blocks + reach) if self.readout_rows == "auto" else float(self.readout_rows)

    @property
    def trained_chunks(self) -> set[int]:
        """The chunks that learn, as indices from 0 to K - 1."""
        count = self.resolved_num_chunks
        if self.train_chunks is None:
            return set(range(count))
        return {n - 1 if n > 0 else count + n for n in self.train_chunks}

    def chunk_settings(self) -> dict[str, Any]:
        """The fields that ZeroLock adds to LoraConfig, as they are written to `zerolock_config.json`."""
        return {name: getattr(self, name) for name in _own_fields()}

    def to_dict(self) -> dict[str, Any]:
        """What goes into `adapter_config.json`: key for key what a plain LoraConfig writes."""
        own = _own_fields()
        return {key: value for key, value in super().to_dict().items() if key not in own}

    def save_pretrained(self, save_directory: str, **kwargs) -> None:
        """Writes `adapter_config.json` as a LoraConfig does, and `zerolock_config.json` beside it."""
        super().save_pretrained(save_directory, **kwargs)
        path = os.path.join(save_directory, CONFIG_NAME)
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(self.chunk_settings(), file, indent=2, sort_keys=True)
        os.replace(path + ".tmp", path)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs):
        """Reads a saved adapter's settings, from a folder or a Hub repository.

        Where there is no `zerolock_config.json` (a plain LoRA adapter), the chunk settings are the defaults and a
        warning says so.
        """
        lora = LoraConfig.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        known = {f.name for f in fields(LoraConfig) if f.init}
        values = {name: getattr(lora, name) for name in known}
        if values["modules_to_save"] is not None:  # PEFT adds the heads of a classifier each time it takes a config
            values["modules_to_save"] = list(dict.fromkeys(values["modules_to_save"]))
        own = _read_chunk_settings(str(pretrained_model_name_or_path), subfolder, kwargs)
        unknown = sorted(set(own) - _own_fields())
        if unknown:
            raise ValueError(
                f"{CONFIG_NAME} at {pretrained_model_name_or_path!r} has unknown settings {unknown}: it was written "
                "by a newer peft_zerolock; upgrade with `pip install -U peft-zerolock`."
            )
        return cls(**values, **own)


def _own_fields() -> set[str]:
    return {f.name for f in fields(ZeroLockConfig)} - {f.name for f in fields(LoraConfig)}


def _read_chunk_settings(source: str, subfolder: str | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    if os.path.isdir(source):
        path = os.path.join(source, subfolder or "", CONFIG_NAME)
    else:
        given = ("cache_dir", "revision", "token", "local_files_only")
        hub: dict[str, Any] = {key: kwargs[key] for key in given if key in kwargs}
        try:
            path = hf_hub_download(source, CONFIG_NAME, subfolder=subfolder, **hub)
        except LocalEntryNotFoundError as error:
            if not _known_absent(source, subfolder, hub):
                raise ValueError(
                    f"{CONFIG_NAME} of {source!r} is not in the cache, and the Hub could not be reached (or was not "
                    "to be asked): whether the adapter has chunk settings is unknown. Connect (or unset "
                    f"HF_HUB_OFFLINE and local_files_only), or fetch it once with `hf download {source}` and give the "
                    "folder."
                ) from error
            path = ""
        except EntryNotFoundError:
            path = ""
    if not os.path.isfile(path):
        logger.warning(f"{source!r} has no {CONFIG_NAME}: a plain LoRA adapter; the chunk settings are defaults.")
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path!r} is damaged ({error}): delete it to go on with default chunk settings.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path!r} is damaged (not an object): delete it to go on with default chunk settings.")
    return settings


def _known_absent(source: str, subfolder: str | None, hub: dict[str, Any]) -> bool:
    """Whether the Hub has said before that there is no such file; its client notes that in the cache."""
    name = f"{subfolder}/{CONFIG_NAME}" if subfolder else CONFIG_NAME
    found = try_to_load_from_cache(source, name, cache_dir=hub.get("cache_dir"), revision=hub.get("revision"))
    return found is not None and not isinstance(found, str)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | set) else value
