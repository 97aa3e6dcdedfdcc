"""What a model, its settings and the environment must be like; everything else is refused before any work."""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.training_args import ParallelMode

from .blocks import base_model_of, find_blocks
from .config import ZeroLockConfig
from .placement import check_full_evaluation, check_offload, check_one_device
from .readout import give_dtype, take_any_dtype
from .stage import Stage
from .staging import dissect

HEADS = ("classifier", "score")  # what they return is the logits, which stay in float32
_REFUSED_OPTIMIZERS = ("lomo", "adalomo")


def check_wrapping(model: nn.Module, config: Any) -> None:
    """Whether `config` can be put on `model`; the model is not changed.

    Raises:
        ValueError: with what was given and what to do.
    """
    if not isinstance(config, ZeroLockConfig):
        raise ValueError(
            f"peft_config is a {type(config).__name__}: ZeroLockTrainer needs a ZeroLockConfig, which takes the same "
            "arguments and num_chunks."
        )
    if isinstance(model, PeftModel) or any(isinstance(m, BaseTunerLayer) for m in model.modules()):
        raise ValueError(
            "peft_config was given together with a model that already has adapters: they would nest. Pass the base "
            "model, or leave peft_config out."
        )
    _check_pad_token(model, config)
    dissect(model, config)


def check_places(model: nn.Module, args: Any) -> None:
    """Whether the model's weights lie where its runtime can train through them.

    Raises:
        ValueError: with what was given and what to do.
    """
    check_offload(model)
    check_full_evaluation(model, args)
    if getattr(args, "runtime", "sequential") == "sequential":
        check_one_device(model)


def check_model(model: nn.Module, devices: list[str] | None = None) -> None:
    """Whether the model is a PeftModel that can be trained chunk by chunk.

    Args:
        devices: where its chunks are to go, if that is settled.

    Raises:
        ValueError: with what was given and what to do.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"The model is a {type(model).__name__}: ZeroLockTrainer trains a PeftModel. Use get_peft_model(model, "
            "ZeroLockConfig(...)), or pass peft_config=ZeroLockConfig(...) to the trainer."
        )
    nested = isinstance(model.get_base_model(), PeftModel) or any(
        isinstance(m, LoraLayer) and isinstance(m.base_layer, LoraLayer) for m in model.modules()
    )
    if nested or isinstance(getattr(model.base_model, "model", None), PeftModel):
        raise ValueError(
            "The model is a PeftModel inside a PeftModel. Merge or unload the inner adapter first "
            "(model = model.merge_and_unload()), then call get_peft_model once."
        )
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(
            f"The model has {len(active)} active adapters ({active}): ZeroLockTrainer trains one. Choose it with "
            "model.set_adapter(name)."
        )
    config = model.peft_config[active[0]]
    if not isinstance(config, ZeroLockConfig):
        raise ValueError(
            f"The adapter {active[0]!r} has a {type(config).__name__}: chunk settings are missing. Make it with "
            "ZeroLockConfig(...), or load it with PeftModel.from_pretrained(base, folder, is_trainable=True, "
            "config=ZeroLockConfig.from_pretrained(folder))."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "The model has no trainable parameter: load the adapter with is_trainable=True, and leave inference_mode "
            "False in its config."
        )
    _check_pad_token(model.get_base_model(), config)
    _check_tied_ends(model.get_base_model())
    _check_biases(model)
    dissect(model, config, devices)


def _check_pad_token(base: Any, config: ZeroLockConfig) -> None:
    """Decoders classify a sequence by its last token, which they find by the padding (transformers#34055)."""
    find_blocks(base)
    if config.task_type == "SEQ_CLS" and hasattr(base, "score") and base.config.get_text_config().pad_token_id is None:
        raise ValueError(
            "The model's config has no pad_token_id, so a batch's last token cannot be found. Set "
            "model.config.pad_token_id = tokenizer.pad_token_id (and tokenizer.pad_token, where it is None)."
        )


def _check_biases(model: nn.Module) -> None:
    """A float32 bias cannot stand in a half-precision layer."""
    for name, parameter in model.named_parameters():
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        if half and parameter.requires_grad and name.endswith(".bias") and "modules_to_save" not in name:
            raise ValueError(
                f"{name} is trained (bias='all' or 'lora_only') inside a layer of {parameter.dtype}, and trainable "
                "weights are float32: load the base model in float32 (with bf16=True in the training arguments), or "
                "use bias='none'."
            )


def _check_tied_ends(base: nn.Module) -> None:
    """LoRA on one end of tied embeddings: merging it would change the other end too (transformers#45127)."""
    ends = [getattr(base, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    weights = [
        end.get_base_layer().weight if isinstance(end, LoraLayer) else getattr(end, "weight", 0) for end in ends
    ]
    if weights[0] is weights[1] and any(isinstance(end, LoraLayer) for end in ends):
        raise ValueError(
            "target_modules include the embeddings or the head, whose weights are tied in this model: merging the "
            "adapter would change both ends. Leave them out, put 'lm_head' into modules_to_save, or untie the model "
            "first (load it with tie_word_embeddings=False and copy the embedding's weight to the head)."
        )


def check_arguments(args: Any) -> None:
    """Whether the training arguments ask for something that local updates cannot do.

    Raises:
        ValueError: with what was given and what to do.
    """
    if args is None:
        return

    def refuse(what: str, remedy: str) -> None:
        raise ValueError(f"ZeroLockTrainer does not work with {what}: {remedy}")

    if args.deepspeed:
        refuse("DeepSpeed", "it shards gradients over the whole model's backward pass. Leave `deepspeed` out.")
    if args.fsdp:
        refuse("FSDP", "it gathers weights by the whole model's backward pass. Leave `fsdp` out.")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in _REFUSED_OPTIMIZERS or "layerwise" in optim:
        refuse(f"optim={optim!r}", "it updates inside the backward pass. Use another one, such as 'adamw_torch'.")
    parallelism = getattr(args, "parallelism_config", None)
    if parallelism is not None:
        sizes = {name: getattr(parallelism, f"{name}_size", 1) for name in ("cp", "sp", "tp")}
        split = {name: size for name, size in sizes.items() if size and size > 1}
        if split:
            refuse(f"parallelism_config with {split}", "sequences and weights cannot be split. Leave it out.")
    if args.world_size > 1 and args.parallel_mode != ParallelMode.DISTRIBUTED:
        refuse(f"parallel mode {args.parallel_mode}", "start the processes with torchrun or accelerate launch.")


def check_control(args: Any, config: ZeroLockConfig) -> None:
    """Whether the run can end with the better of chunks and control.

    Raises:
        ValueError: another rule is to choose the weights that it ends with.
    """
    if config.control and args.load_best_model_at_end:
        raise ValueError(
            "control=True and load_best_model_at_end=True each choose the weights that the training ends with: leave "
            "one of them out."
        )


def check_visible_devices(args: Any) -> None:
    """Whether Trainer would put nn.DataParallel around the model; it does not where the model lies on several devices.

    Raises:
        ValueError: it would.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"ZeroLockTrainer does not work with nn.DataParallel ({args.n_gpu} visible GPUs in one process): set "
            "CUDA_VISIBLE_DEVICES to one of them, or let each chunk work on its own with "
            "ZeroLockTrainingArguments(runtime='concurrent', devices=[...])."
        )


def check_runtime(args: Any, config: ZeroLockConfig, scaler: Any, optimizer: Any) -> None:
    """Whether the concurrent runtime can do what the arguments ask for.

    Args:
        scaler: the loss scaler of fp16, or None.
        optimizer: what was given to the trainer, or None.

    Raises:
        ValueError: with what was given and what to do.
    """
    if getattr(args, "runtime", "sequential") != "concurrent":
        return

    def refuse(what: str, remedy: str) -> None:
        raise ValueError(f"runtime='concurrent' does not work with {what}: {remedy}")

    otherwise = "or use runtime='sequential'."
    if args.world_size > 1:
        refuse(
            f"{args.world_size} processes",
            f"it is one process with several devices. Start it without a launcher, {otherwise}",
        )
    if args.fp16 or scaler is not None:
        refuse(
            "fp16", f"one loss scale for all stages would make each wait for the others. Use bf16=True, {otherwise}"
        )
    if args.torch_compile:
        refuse("torch_compile", f"compiled code is not safe to be made in several threads. Leave it out, {otherwise}")
    if optimizer is not None:
        refuse(
            "an optimizer given to the trainer",
            "each stage steps its own part. Give optimizer_cls_and_kwargs=(class, arguments) instead, " + otherwise,
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim.startswith("schedule_free"):
        refuse(f"optim={optim!r}", f"it swaps all weights before each micro-batch. Use another one, {otherwise}")
    if config.readout_weights == "current":
        refuse(
            "readout_weights='current'",
            "a chunk would have to wait for the later ones' steps, and so for their backward passes. Use "
            f"readout_weights='own', {otherwise}",
        )


def check_launcher(fsdp: bool, deepspeed: bool) -> None:
    """Whether accelerate was launched with something that local updates cannot do.

    Raises:
        ValueError: with what was given and what to do.
    """
    for asked, name in ((fsdp, "FSDP"), (deepspeed, "DeepSpeed")):
        if asked:
            raise ValueError(
                f"ZeroLockTrainer does not work with {name}, which the launcher asks for: start with torchrun, or "
                "with accelerate launch --multi_gpu (data parallel)."
            )


def prepare_trainable(model: nn.Module) -> None:
    """Makes every trainable weight float32, and lets saved modules take the base model's hidden states.

    LoRA layers cast their input by themselves; a module of `modules_to_save` in float32 behind a half-precision base
    needs it done.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    head = getattr(base_model_of(model), "get_output_embeddings", lambda: None)()
    for name, wrapper in model.named_modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        frozen = next((p.dtype for p in wrapper.original_module.parameters() if p.is_floating_point()), None)
        for module in wrapper.modules_to_save.values():
            take_any_dtype(module)
            if frozen in (torch.float16, torch.bfloat16) and wrapper is not head and name.split(".")[-1] not in HEADS:
                give_dtype(module, frozen)


def check_given_optimizer(optimizer: Any, stages: list[Stage], config: ZeroLockConfig) -> None:
    """An optimizer that was given to the trainer must know what is to learn.

    Raises:
        ValueError: it lacks the parameters of the readouts or of the control.
    """
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in known for stage in stages for p in stage.extra.values()):
        raise ValueError(
            f"The optimizer given to the trainer does not have the parameters of the readouts and the control "
            f"(readout={config.resolved_readout!r}, control={config.control}), so they would never learn. Give "
            "optimizer_cls_and_kwargs=(class, arguments) instead, or choose readout='lm_head' and control=False."
        )
