"""Cuts a PeftModel into stages: finds its blocks, tests that it can be cut, and gives each chunk view and readout."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from .admission import Anatomy, admit, dry_batch, quiet_model
from .blocks import BlockMap, base_model_of, find_blocks
from .config import CLASSIFICATION_TASKS, ZeroLockConfig
from .noise import own_dropout
from .partition import cut, split_evenly
from .placement import Gathering, device_of, known_devices, numbered, spread
from .readout import DEFAULT_DIM, Decoder, ResidualAdapter, Tail, make_tail, readout_blocks, take_any_dtype
from .stage import Stage, balance_weight, with_control


def dissect(
    model: nn.Module, config: ZeroLockConfig, devices: list[str] | None = None
) -> tuple[BlockMap, list[range], Anatomy]:
    """Finds a model's blocks, cuts them into chunks and runs the admission test; changes nothing.

    Args:
        devices: where the chunks are to go, one each. Without them the cuts of a model that lies on several devices
            are those of its device map.

    Raises:
        UnsupportedModelError: the model fails the admission test.
        ValueError: the chunk settings do not fit the model, or the devices do not fit the machine or the chunks.
    """
    find_blocks(model)
    with quiet_model(model):
        batch = dry_batch(model)
        blocks = BlockMap.of(model, batch)
        number = config.resolved_num_chunks
        homes = [device_of(block) for block in blocks.blocks]
        chunks = cut(homes, config.chunk_sizes, number, devices and known_devices(devices, number))
        return blocks, chunks, admit(blocks, chunks, batch)


def place(model: nn.Module, config: ZeroLockConfig, devices: list[str] | None, default: torch.device) -> None:
    """Spreads a PeftModel over devices, each chunk on its own, where it is to lie on others than the Trainer's one.

    Cuts that follow a device map are written into `config`, so that what is saved says how the model was cut.

    Args:
        devices: one a chunk; None: the model's device map says where.
        default: the Trainer's device.

    Raises:
        UnsupportedModelError: the model fails the admission test.
        ValueError: the devices do not fit the machine, the chunks or the model's device map.
    """
    blocks, chunks, anatomy = dissect(model, config, devices)
    if devices is not None:
        targets = known_devices(devices, len(chunks))
    else:
        targets = [device_of(blocks.blocks[chunk.start]) for chunk in chunks]
        if chunks != split_evenly(len(blocks), len(chunks)):
            config.num_chunks, config.chunk_sizes = None, [len(chunk) for chunk in chunks]
    if len(set(targets)) > 1 or (devices is not None and targets[0] != numbered(default)):
        spread(model, blocks.blocks, chunks, targets, anatomy.tail_parameters, anatomy.owner)


def build_stages(
    model: nn.Module,
    config: ZeroLockConfig,
    sliced: bool,
    label_smoothing: float = 0.0,
    vocab: Tensor | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    prepare: Callable[[nn.Module], nn.Module] = lambda module: module,
    devices: list[str] | None = None,
) -> list[Stage]:
    """Cuts a PeftModel into stages.

    Adapters of chunks that do not learn (`train_chunks`) are frozen; nothing else about the model changes.

    Args:
        sliced: use the token objective, a slice at a time, in place of the model's own loss.
        vocab: token ids for the readout of kind `"vocab"`.
        prepare: applied to each view's module tree (mixed precision, compilation).
        devices: as in `dissect`. A stage has all that it reads on the device of its blocks.

    Raises:
        UnsupportedModelError: the model fails the admission test.
        ValueError: the chunk settings do not fit the model.
    """
    blocks, chunks, anatomy = dissect(model, config, devices)
    if getattr(base_model_of(model).config, "output_router_logits", False):
        balance_weight(model)
    stages = [_build(blocks, config, chunks, k, anatomy, sliced, vocab) for k in range(len(chunks))]
    if config.control:
        stages[-1].control = _build_control(blocks, config, stages[-1], anatomy, sliced)
    gathering = Gathering(model, blocks.blocks)
    for stage in with_control(stages):
        moved = gathering.gather(stage.trees().values(), device_of(blocks.blocks[stage.chunk.start]))
        stage.copies = {name: moved.get(id(p), p) for name, p in stage.copies.items()}
    gathering.warn_of_blocks()
    shared, tail = ({id(p) for p in some} for some in (model.parameters(), anatomy.tail_parameters))
    shared, tail = (ids | gathering.copies_of(ids) for ids in (shared, tail))
    for stage in with_control(stages):
        for prefix, tree in stage.trees().items():
            for name, parameter in tree.named_parameters():
                if id(parameter) in blocks.aliases:
                    stage.aliases.append(blocks.aliases[id(parameter)])
                elif id(parameter) not in shared and not stage.is_last:
                    kind = stage.readout if parameter.requires_grad else stage.copies
                    kind[f"{prefix}.{name}"] = parameter
        if not stage.learns:
            stage.readout, stage.copies = {}, {}
        if len(stages) > 1:
            own_dropout(stage.trees(), stage.noise)
        stage.label_smoothing, stage.autocast = label_smoothing, autocast
        stage.view.module = prepare(stage.view.module)
        _set_modes(stage, tail)
    for parameter in model.parameters():
        if anatomy.owner.get(id(parameter), 0) not in config.trained_chunks:
            parameter.requires_grad_(False)
    return stages


def _build_control(blocks: BlockMap, config: ZeroLockConfig, last: Stage, anatomy: Anatomy, sliced: bool) -> Stage:
    """The last chunk once more, on what the chunks below it make of their input now."""
    trained = {name: p for name, p in blocks.model.named_parameters() if p.requires_grad}
    tail_ids = {id(p) for p in anatomy.tail_parameters} if sliced else set()
    below = range(last.chunk.start)
    view = blocks.view(last.chunk, fresh=[p for p in trained.values() if id(p) not in tail_ids], below=below)
    tail = Tail(blocks.view(range(0), fresh=[p for p in trained.values() if id(p) in tail_ids])) if sliced else None
    found = {name: p for name, p in blocks.parameters_of(view).items() if id(trained.get(name)) not in tail_ids}
    if tail is not None and tail.view is not None:
        tail_names = {name for name, p in trained.items() if id(p) in tail_ids}
        found |= {name: p for name, p in blocks.parameters_of(tail.view).items() if name in tail_names}
    adapters = {name: found[name] for name, p in trained.items() if anatomy.owner[id(p)] == last.index}
    copies = {name: found[name] for name in trained if name not in adapters}
    for parameter in copies.values():
        parameter.requires_grad_(False)
    return Stage(last.index, last.chunk, True, config, view, tail, adapters, copies=copies, is_control=True)


def _set_modes(stage: Stage, tail_parameters: set[int]) -> None:
    """Training mode, but for a tail's frozen modules."""
    stage.view.module.train()
    for tree in stage.tail.modules().values() if stage.tail is not None else ():
        tree.eval()
        for module in tree.modules():
            if any(p.requires_grad or id(p) in tail_parameters for p in module.parameters(recurse=False)):
                module.train()
            elif isinstance(module, LoraLayer) and any(p.requires_grad for p in module.parameters()):
                module.train()  # its dropout too


def _build(
    blocks: BlockMap,
    config: ZeroLockConfig,
    chunks: list[range],
    k: int,
    anatomy: Anatomy,
    sliced: bool,
    vocab: Tensor | None,
) -> Stage:
    chunk, is_last = chunks[k], k == len(chunks) - 1
    named = blocks.model.named_parameters()
    adapters = {name: p for name, p in named if p.requires_grad and anatomy.owner[id(p)] == k}
    if k not in config.trained_chunks:
        adapters = {}
    if is_last or not adapters:
        view, tail = blocks.view(chunk), None
        if sliced:
            tail = make_tail(blocks, config, True, anatomy.tail_parameters, vocab) if is_last else Tail(None)
        return Stage(k, chunk, is_last, config, view, tail, adapters)
    adapter: nn.Module | None = None
    device = base_model_of(blocks.model).get_input_embeddings().weight.device
    hidden_size = base_model_of(blocks.model).config.get_text_config().hidden_size
    if config.objective == "reconstruction":
        view = blocks.view(chunk, adapter=Decoder(hidden_size, config.readout_dim, device))
        return Stage(k, chunk, is_last, config, view, Tail(None) if sliced else None, adapters)
    if config.resolved_readout == "adapter":
        adapter = ResidualAdapter(hidden_size, config.readout_dim or DEFAULT_DIM, device)
    copies = readout_blocks(blocks, config, chunk) if config.resolved_readout == "blocks" else None
    reach = len(copies or {})
    share = config.row_share(len(chunk), reach)
    if sliced:
        tail = make_tail(blocks, config, False, anatomy.tail_parameters, vocab)
        view = blocks.view(chunk, copies, adapter)
        return Stage(k, chunk, is_last, config, view, tail, adapters, row_share=share, reach=reach)
    if config.readout_weights == "current":
        view = blocks.view(chunk, copies, current=[p for p in anatomy.tail_parameters if p.requires_grad])
        return Stage(k, chunk, is_last, config, view, None, adapters, row_share=share, reach=reach)
    classifies = config.task_type in CLASSIFICATION_TASKS
    fresh = [p for p in anatomy.tail_parameters if classifies or p.requires_grad]
    view = blocks.view(chunk, copies, adapter, fresh)
    known = {id(p) for p in blocks.model.parameters()}
    known |= {id(p) for copied in (copies or {}).values() for p in copied.parameters()}
    known |= {id(p) for p in adapter.parameters()} if adapter is not None else set()
    for module in view.module.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in known:
                parameter.requires_grad_(classifies)
                if classifies:
                    parameter.data = parameter.data.float()
                    take_any_dtype(module)
    return Stage(k, chunk, is_last, config, view, None, adapters, row_share=share, reach=reach)
