"""Plans a training run: what each way to train takes on each device, counted before a weight exists."""

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..blocks import find_blocks
from ..config import ZeroLockConfig
from ..partition import Load, split_by_load, split_evenly
from ..sources import loading, resolve_model
from .blank import Blank, blank_model, known_task
from .count import StepCount
from .devices import Device, parse_devices
from .measure import load_weights, measure_row
from .result import Plan, Row
from .trial import Batch, Trial
from .uses import OPTIMIZERS, largest_batch, uses_of, with_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPLITS = ("even", "cost")
DEFAULT_CHUNKS = (2, 3, 4)


def plan(
    model: str | PretrainedConfig | nn.Module,
    config: ZeroLockConfig,
    *,
    num_chunks: Sequence[int] | None = None,
    batch: int = 8,
    seq: int = 512,
    supervised: int | None = None,
    num_labels: int | None = None,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    devices: Iterable[str | Device] = (),
    split: str = "even",
    in_flight: int = 1,
    checkpointing: bool = False,
    measure: bool = False,
) -> Plan:
    """Counts memory and floating-point operations of a training step for several ways to train, side by side.

    The model is built from its config on fake tensors, and its real stages run a real step on them: nothing is
    downloaded but the config, and no weight takes memory. The rows are LoRA with backpropagation, the same with
    activation checkpointing, and ZeroLock at several chunk counts. The admission test compares values, which there
    are none of: training runs it (and `zerolock inspect`).

    Args:
        model: a Hub name, a folder, a gguf or config.json file, a short name; a transformers config; or a model, of
            which only the config is used.
        config: adapters and chunk settings; its task_type chooses the model class.
        num_chunks: chunk counts to compare. Default: the config's, where it has one; otherwise 2, 3 and 4.
        batch, seq: rows and tokens of a micro-batch.
        supervised: tokens of a row that are targets (causal LMs); default: all but the first.
        num_labels: classes of a classification head, where the model's config is not to say it.
        dtype: of the frozen weights: "float32", "bfloat16" or "float16". What is trained is float32.
        optimizer: "adamw" or "sgd".
        devices: where it shall run, each a Device or `"name:memory:speed"`. One, or none: all chunks share it. More:
            one chunk on each, in order, split evenly and fitted to their memory and speed.
        split: how one device's chunks are split: "even", or "cost" (FLOPs of each chunk with its readout).
        in_flight: micro-batches under way between devices: how many hidden states wait before a chunk.
        checkpointing: activation checkpointing in the ZeroLock rows too.
        measure: also load the weights, run real steps and measure; one device.

    Raises:
        ValueError: an argument is out of its range or does not fit the model; or the model's code asks for values.
    """
    chosen = parse_devices(devices)
    if measure and (len(chosen) > 1 or not isinstance(model, str)):
        raise ValueError("measure loads the weights onto one device: give the model by its name, and no more devices.")
    if not chosen and torch.cuda.is_available():
        chosen = [Device("cuda", torch.cuda.get_device_properties(0).total_memory)]
    if not _is_count(in_flight, 1):
        raise ValueError(f"in_flight={in_flight!r} is not valid: it must be a whole number >= 1.")
    shape = _batch(batch, seq, supervised)
    _choose("split", split, SPLITS)
    _choose("optimizer", optimizer, OPTIMIZERS)
    weights = DTYPES[_choose("dtype", dtype, DTYPES)]
    given: Any = read_config(model) if isinstance(model, str) else getattr(model, "config", model)
    found = _usable(given, config)
    if num_labels is not None:
        found.num_labels = num_labels
    planner = _Planner(found, config, shape, weights, optimizer, chosen, in_flight, checkpointing)
    planned = list(planner.rows(_chunk_settings(config, found, num_chunks, chosen), split))
    name = model if isinstance(model, str) else found.model_type
    blocks = found.get_text_config().num_hidden_layers
    rows = [row for _, row in planned]
    made = Plan(name, blocks, batch, seq, shape.supervised, dtype, optimizer, in_flight, rows)
    if measure:
        loaded = load_weights(str(model), found, known_task(config), weights)
        for way, row in planned:
            made.measured_by = measure_row(loaded, way, row, shape, optimizer)
    return made


def read_config(name: str) -> PretrainedConfig:
    """The config of a model, by any name that `plan` takes.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    source = resolve_model(name)
    with loading(name):
        return AutoConfig.from_pretrained(source.path, **source.tokenizer_kwargs())


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _choose(name: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known: it must be one of {', '.join(allowed)}.")
    return value


def _batch(batch: int, seq: int, supervised: int | None) -> Batch:
    for name, value, least in (("batch", batch, 1), ("seq", seq, 2)):
        if not _is_count(value, least):
            raise ValueError(f"{name}={value!r} is not valid: it must be a whole number >= {least}.")
    if supervised is not None and not (_is_count(supervised, 1) and supervised < seq):
        raise ValueError(f"supervised={supervised!r} is not valid: it must be from 1 to seq - 1 = {seq - 1}.")
    return Batch(batch, seq, seq - 1 if supervised is None else supervised)


def _usable(model_config: PretrainedConfig, config: ZeroLockConfig) -> PretrainedConfig:
    """A copy, as it is set for training; a decoder classifies by the last token, for which it needs a pad token."""
    model_config = copy.deepcopy(model_config)
    model_config.use_cache = False
    text = model_config.get_text_config()
    if config.task_type == "SEQ_CLS" and text.pad_token_id is None:
        text.pad_token_id = 0
    return model_config


def _chunk_settings(
    config: ZeroLockConfig, model_config: PretrainedConfig, num_chunks: Sequence[int] | None, devices: list[Device]
) -> list[ZeroLockConfig]:
    blocks, spread = model_config.get_text_config().num_hidden_layers, len(devices)
    if num_chunks is None:
        if config.chunk_sizes is not None or config.num_chunks is not None:
            num_chunks = [config.resolved_num_chunks]
        else:
            num_chunks = [spread] if spread > 1 else [k for k in DEFAULT_CHUNKS if k <= blocks] or [1]
    if spread > 1 and list(num_chunks) != [spread]:
        raise ValueError(
            f"{spread} devices and num_chunks={list(num_chunks)} disagree: each device trains one chunk. Leave "
            "num_chunks out, or give as many devices."
        )
    for count in num_chunks:
        split_evenly(blocks, count)
    if config.chunk_sizes is not None and list(num_chunks) == [len(config.chunk_sizes)]:
        return [config]
    return [dataclasses.replace(config, num_chunks=count, chunk_sizes=None) for count in num_chunks]


@dataclass
class Way:
    """How a row trains."""

    name: str
    method: str
    config: ZeroLockConfig
    checkpointing: bool = False
    split: str = ""


@dataclass
class _Planner:
    model_config: PretrainedConfig
    config: ZeroLockConfig
    batch: Batch
    dtype: torch.dtype
    optimizer: str
    devices: list[Device]
    in_flight: int
    checkpointing: bool

    def rows(self, settings: list[ZeroLockConfig], split: str) -> Iterator[tuple[Way, Row]]:
        """Each way to train with what it takes, backpropagation first."""
        way = Way("LoRA with BP", "bp", self.config)
        base, reference, _ = self._counted(way)
        flops = reference.flops
        yield way, reference
        if base.model.get_base_model().supports_gradient_checkpointing:
            way = Way("LoRA with BP and checkpointing", "checkpointing", self.config, True)
            yield way, self._counted(way, flops)[1]
        for chosen in settings:
            name = f"ZeroLock, {chosen.resolved_num_chunks} chunk{'s' if chosen.resolved_num_chunks > 1 else ''}"
            kind = "even" if chosen.chunk_sizes is None else "given"
            way = Way(name, "zerolock", chosen, self.checkpointing, kind)
            trial, row, counts = self._counted(way, flops)
            fitted = "devices" if len(self.devices) > 1 else split
            proposed = row.chunk_sizes
            if kind == "even" and fitted != "even":
                proposed = self._proposed(base, flops, trial, row, counts)
            if proposed == row.chunk_sizes or fitted == "devices":
                yield way, row
            if proposed != row.chunk_sizes:
                config = dataclasses.replace(chosen, num_chunks=None, chunk_sizes=proposed)
                way = Way(name, "zerolock", config, self.checkpointing, fitted)
                yield way, self._counted(way, flops)[1]

    def _counted(self, way: Way, reference: int | None = None) -> tuple[Trial, Row, list[StepCount]]:
        with _values_unknown(self.model_config.model_type):
            mode = Blank()
            model = blank_model(self.model_config, way.config, self.dtype, mode)
            trial = Trial(model, way.config, way.method == "zerolock", way.checkpointing, mode)
            counts = trial.count(self.batch)
            uses = uses_of(trial, counts, self.devices, self.optimizer, self.in_flight)
            sizes = [len(stage.chunk) for stage in trial.stages] or [len(find_blocks(model))]
            row = Row(way.name, way.method, way.split, sizes, uses)
            row.overhead_percent = 0.0 if reference is None else 100 * (row.flops / reference - 1)

            def uses_at(rows: int) -> list[Any]:
                found = trial.count(with_rows(self.batch, rows))
                return uses_of(trial, found, self.devices, self.optimizer, self.in_flight)

            row.largest_batch = largest_batch(uses_at, self.batch.rows, uses)
        return trial, row, counts

    def _proposed(self, base: Trial, flops: int, trial: Trial, row: Row, counts: list[StepCount]) -> list[int]:
        """Chunk sizes from each block's cost, and from what each chunk takes besides its blocks."""
        blocks, forward = base.block_costs(self.batch)
        tail = forward - sum(b.flops for b in blocks)
        factor = (flops - 2 * tail) / sum(b.flops for b in blocks)  # forward and backward; the tail is run twice over
        state = 2 + OPTIMIZERS[self.optimizer] / 4
        cost = [factor * b.flops for b in blocks]
        size = [b.weights + state * b.trained + b.kept for b in blocks]
        inside = [stage.chunk for stage in trial.stages]
        held = [use.total for use in row.devices] if len(row.devices) > 1 else [count.peak for count in counts]
        load = Load(
            cost,
            [count.flops - sum(cost[i] for i in chunk) for count, chunk in zip(counts, inside, strict=True)],
            size,
            [total - sum(size[i] for i in chunk) for total, chunk in zip(held, inside, strict=True)],
        )
        if len(self.devices) > 1:
            return split_by_load(load, [d.speed for d in self.devices], [d.memory for d in self.devices])
        return split_by_load(load, [1.0] * len(inside), [math.inf] * len(inside))


@contextmanager
def _values_unknown(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"{name!r} cannot be planned from its config with these settings: its step needs values or operations "
            f"that tensors without data do not have ({error}). Try another dtype, or measure a real run."
        ) from error
