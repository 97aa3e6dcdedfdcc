"""ZeroLockTrainer: transformers.Trainer whose training step is that of the stages."""

import inspect
from functools import partial, wraps
from typing import Any

import torch
from accelerate.utils import DynamoBackend, convert_outputs_to_fp32, send_to_device
from accelerate.utils.memory import clear_device_cache
from peft import get_peft_model
from torch import Tensor, nn
from transformers import Trainer
from transformers.utils import logging

from . import contract, hub
from .admission import evaluation_mode
from .blocks import Slot
from .config import ZeroLockConfig
from .driving import DrivingMixin
from .early_exit import EarlyExit
from .guidance import GuidanceMixin
from .objective import supervised_tokens
from .optimizer import split_by_chunk
from .parallel import GradientAverage, same_start
from .readout import readout_vocabulary
from .runtime import WindowReport
from .saving import SavingMixin
from .stage import Entry, Stage, with_control
from .staging import build_stages, place

logger = logging.get_logger(__name__)


class ZeroLockMixin(GuidanceMixin, DrivingMixin, SavingMixin):
    """Makes a Trainer, or a trainer derived from it, train a PEFT model chunk by chunk.

    `class MyTrainer(ZeroLockMixin, SFTTrainer)` is all it takes. Evaluation, prediction, logging, callbacks and saving
    stay the Trainer's own.

    Args:
        model: a PeftModel made with a ZeroLockConfig, or a transformers model together with `peft_config`.
        peft_config (`ZeroLockConfig`, *optional*): how to wrap `model`.
        args, kwargs: as in Trainer.

    Raises:
        ValueError: before any work, if the model, the settings or the environment cannot be used; the message says
            what was given, what is allowed and what to do.
    """

    def __init__(self, model: Any = None, args: Any = None, *positional, peft_config=None, **kwargs):
        if args is not None:
            contract.check_arguments(args)
            hub.check_hub_target(args)
        if isinstance(model, nn.Module):
            model = _ready(model, peft_config, args)
        elif kwargs.get("model_init") is not None:
            make_base = kwargs["model_init"]

            @wraps(make_base)
            def make_model(*trial):
                return _ready(make_base(*trial), peft_config, args)

            kwargs["model_init"] = make_model
        elif getattr(args, "devices", None) is not None:
            raise ValueError(
                f"devices={args.devices!r} were given with model={model!r}: load the model, which is then spread over "
                "them, or give model_init."
            )
        elif peft_config is not None:
            if not isinstance(model, str) or "peft_config" not in inspect.signature(super().__init__).parameters:
                raise ValueError(
                    f"peft_config was given with model={model!r}: give a model, such as "
                    "AutoModelForCausalLM.from_pretrained(name), or model_init."
                )
            kwargs["peft_config"] = peft_config  # TRL's trainers load and wrap by themselves
        super().__init__(model, args, *positional, **kwargs)
        if isinstance(model, str):
            self.model = _ready(self.model, None, self.args)
        contract.check_arguments(self.args)
        contract.check_visible_devices(self.args)
        contract.check_launcher(self.is_fsdp_enabled, self.is_deepspeed_enabled)
        contract.check_places(self.model, self.args)
        contract.check_model(self.model, self._devices)
        contract.check_control(self.args, self.zerolock_config)
        contract.check_runtime(self.args, self.zerolock_config, self.accelerator.scaler, self.optimizer)
        self._show_finished_windows()
        self._average = GradientAverage()
        self._stages: list[Stage] = []
        self._staged_model: nn.Module | None = None
        self._sums: dict[str, Tensor] = {}
        self._window, self._windows, self._row, self._micro_batch = -1, 0, 0, 0
        self._exit: EarlyExit | None = None
        self.windows_without_targets = 0

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, without DistributedDataParallel around the model: a chunk has a backward pass of its own."""
        super().create_accelerator_and_postprocess()
        # In evaluation mode accelerate leaves the wrapper out, and keeps mixed precision and compilation.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    # ---- stages ----

    @property
    def stages(self) -> list[Stage]:
        """The model's stages, made when they are first needed."""
        if self._staged_model is not self.model:
            config = self.zerolock_config
            vocab = None
            if config.resolved_readout == "vocab":
                collate = self._get_collator_with_removed_columns(self.data_collator)
                vocab = readout_vocabulary(config, self.train_dataset, collate)
            contract.prepare_trainable(self.model)
            with torch.random.fork_rng():
                torch.manual_seed(self.args.seed)
                self._stages = build_stages(
                    self.model,
                    config,
                    self._is_sliced,
                    self.args.label_smoothing_factor,
                    vocab,
                    self.accelerator.autocast,
                    self._prepare_view,
                    self._devices,
                )
            self._staged_model = self.model
            self._runtime = self._make_runtime(self._stages)
        return self._stages

    @property
    def _devices(self) -> list[str] | None:
        return getattr(self.args, "devices", None)

    @property
    def _is_sliced(self) -> bool:
        if self.zerolock_config.logits_slice is None or not getattr(self, "_loss_shifts_labels", False):
            return False
        if self._has_own_loss:
            logger.warning_once("A loss of your own needs whole outputs: logits_slice is not used.")
        return not self._has_own_loss

    @property
    def _has_own_loss(self) -> bool:
        return type(self).compute_loss is not Trainer.compute_loss or self.compute_loss_func is not None

    def _prepare_view(self, module: nn.Module) -> nn.Module:
        """Mixed precision as accelerate puts it around a model, and compilation, block by block."""
        accelerator = self.accelerator
        if accelerator.native_amp:
            forward = module.forward

            @wraps(forward)
            def autocast_forward(*args, **kwargs):
                with accelerator.autocast():
                    return forward(*args, **kwargs)

            module.forward = convert_outputs_to_fp32(autocast_forward)
        dynamo = accelerator.state.dynamo_plugin
        if dynamo.backend != DynamoBackend.NO:
            for slot in module.modules():
                if isinstance(slot, Slot) and slot.block is not None:
                    slot.block.compile(**dynamo.to_kwargs())
        return module

    @property
    def readouts(self) -> dict[str, nn.Parameter]:
        """What the stages have of their own, by stage and name: readouts, the control, frozen copies."""
        owned = ((stage.name, stage.extra | stage.copies) for stage in with_control(self.stages))
        return {f"{stage}.{name}": p for stage, parameters in owned for name, p in parameters.items()}

    # ---- training ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Trainer's optimizer, with parameter groups of their own for each chunk's adapters and readout.

        Raises:
            ValueError: an optimizer was given to the trainer that does not know the readouts' parameters.
        """
        self._sums, self._window, self._windows = {}, -1, 0
        if self.optimizer is None:
            self._staged_model = None  # hooks and checkpointing may have been switched on since they were looked at
        stages = with_control(self.stages)
        if self.accelerator.num_processes > 1:
            same_start(p for s in stages for p in (*s.adapters.values(), *s.readout.values(), *s.copies.values()))
        if self.optimizer is not None:
            contract.check_given_optimizer(self.optimizer, stages, self.zerolock_config)
            return self.optimizer
        learning = nn.ModuleDict({"model": self.model if model is None else model})
        for stage in stages:
            for name, parameter in stage.extra.items():
                _put(learning, f"{stage.name}.{name}", parameter)
        optimizer = super().create_optimizer(learning)
        split_by_chunk(optimizer, stages, self.zerolock_config.readout_learning_rate)
        self.optimizer = self._by_stage(optimizer)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None) -> Tensor:
        """One micro-batch through all the stages: each runs forward, hands on and runs its own backward at once.

        Returns:
            The last chunk's task loss, scaled as Trainer's is: of this micro-batch, or of the oldest one that a
            concurrent runtime has finished and that was not returned yet (zero where there is none).
        """
        stages = self.stages
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        if self._window != self.state.global_step:
            self._window = self._row = self.state.global_step
            self._windows += 1
            self._micro_batch = 0
            self._runtime.begin_window()
        self._micro_batch += 1
        zero = torch.zeros((), device=self.args.device)
        ends_window = self.accelerator.sync_gradients
        if not self._has_targets(inputs, num_items_in_batch):
            for stage in with_control(stages) if ends_window else ():
                self._runtime.finished(stage)
            self._average.wait()
            if ends_window and self._runtime.is_idle:
                self.accelerator.gradient_state._set_sync_gradients(False)  # the optimizer takes no step
            return zero
        count = self._supervised_count(inputs, num_items_in_batch)
        scaler = self.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        draw = f"{self.args.seed}/{self.args.process_index}/{self._window}/{self._micro_batch}"
        entry = Entry(inputs, count, grad_scale=scale, resting=self._resting, window=self._window, draw=draw)
        # As the rows of one process that has the batches of all, one after the other.
        entry.first_row = self._row + self.accelerator.process_index * entry.size
        self._row += self.accelerator.num_processes * entry.size
        loss_of = partial(self._own_loss, num_items_in_batch, self.current_gradient_accumulation_steps)
        report = self._runtime.submit(entry, loss_of, ends_window)
        self._average.wait()
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        return zero if report is None else self._add_to_log(report)

    def _has_targets(self, inputs: dict[str, Any], count: Any) -> bool:
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if labels is None and self._is_sliced:
            raise ValueError(
                f"The batch has no labels, only {', '.join(inputs)}: give the data set a `labels` column, or a data "
                "collator that makes them, such as DataCollatorForLanguageModeling(tokenizer, mlm=False)."
            )
        if not torch.is_tensor(labels) or labels.is_floating_point():
            return True
        if labels.dim() == 2 and getattr(self, "_loss_shifts_labels", False) and "shift_labels" not in inputs:
            labels = labels[:, 1:]
        if bool((labels != -100).any()):
            return True
        if count is None or int(count) == 0:
            self.windows_without_targets += self.accelerator.sync_gradients
            logger.warning_once(
                "An update window had no supervised token (all labels are -100): it changes no weight. Check that the "
                "answers survive truncation. Their number is in trainer.windows_without_targets."
            )
        return False

    def _supervised_count(self, inputs: dict[str, Any], num_items: Any) -> Any:
        """Supervised positions of the update window, divided by the processes where Trainer multiplies by them."""
        if num_items is not None:
            return num_items / self._processes_averaged
        if self._is_sliced:
            number: Any = supervised_tokens(inputs)[1].numel()
        else:
            labels = inputs.get("labels")
            number = labels.ne(-100).sum() if torch.is_tensor(labels) else 1
        return number * self.current_gradient_accumulation_steps

    @property
    def _processes_averaged(self) -> int:
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    def _own_loss(
        self,
        num_items: Any,
        micro_batches: int,
        view: nn.Module,
        inputs: dict[str, Any],
        with_outputs: bool,
        row_share: float,
    ) -> tuple[Tensor, Any]:
        """The model's own loss on a view, scaled for the update window, and its outputs where they are asked for.

        Classification losses of transformers ignore the window's count and are means over their micro-batch. They are
        weighed here by the share of the window that the micro-batch has, so that accumulation changes nothing.
        """
        labels = inputs.get("labels")
        shifts = getattr(self, "_loss_shifts_labels", False)
        share: Any = 1.0
        if num_items is not None:
            device = next(value.device for value in inputs.values() if torch.is_tensor(value))
            num_items = send_to_device(num_items, device) * row_share
        by_rows = not (self._has_own_loss or self.label_smoother or shifts)
        if by_rows and num_items is not None and torch.is_tensor(labels):
            share = labels.ne(-100).sum() * self._processes_averaged / num_items
            num_items = None
        else:
            scaled = self.loss_is_scaled_for_ga
            if scaled is None:
                counted = self.model_accepts_loss_kwargs and num_items is not None
                scaled = counted or self.compute_loss_func is not None
            share = 1.0 if scaled else 1 / micro_batches
        with self.compute_loss_context_manager():
            found: Any = self.compute_loss(view, inputs, return_outputs=with_outputs, num_items_in_batch=num_items)
        loss, outputs = found if with_outputs else (found, None)
        return loss * share, outputs

    def _get_grad_norm(self, model: nn.Module, grad_norm=None):
        return self._clip(float("inf")) if grad_norm is None else grad_norm

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clips each chunk's adapters, and its readout, to max_grad_norm on their own; returns the adapters' norm."""
        return self._clip(self.args.max_grad_norm)

    def _clip(self, limit: float) -> Tensor:
        if self._runtime.is_idle:
            return torch.zeros((), device=self.args.device)
        self.accelerator.unscale_gradients()
        return self._runtime.clip(limit).to(self.args.device)

    # ---- logging and evaluation ----

    def _add_to_log(self, report: WindowReport) -> Tensor:
        """Adds a micro-batch's terms to the next log; returns the last chunk's task loss."""
        if self._control is not None:
            self._control.add(report.window, report.task)
        for kind, values in (("loss", report.task), ("consistency", report.consistency)):
            for name, value in values.items():
                key = f"{kind}/{name}"
                self._sums[key] = self._sums[key] + value if key in self._sums else value
        return report.task[self._stages[-1].name].to(self.args.device)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Trainer's log, with each chunk's task and consistency terms (means over the windows since the last one)."""
        if "loss" in logs and self._windows:
            stages = with_control(self._stages)
            names = [f"loss/{s.name}" for s in stages if s.learns or s.is_last]
            names += [f"consistency/{s.name}" for s in stages if s.has_consistency]
            zero = torch.zeros((), device=self.args.device)
            means = torch.stack([self._sums.get(name, zero).to(zero) for name in names]) / self._windows
            if self.accelerator.num_processes > 1:
                means = self.accelerator.reduce(means, "mean")
            logs = {**logs, **{name: round(mean, 6) + 0.0 for name, mean in zip(names, means.tolist(), strict=True)}}
            self._sums, self._windows = {}, 0
        super().log(logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval", per_chunk: bool = False
    ) -> dict[str, float]:
        """Evaluates the plain model, as Trainer does.

        Args:
            per_chunk: also evaluate each readout, as `eval_chunk_k_...` (early exit accuracy over depth); chunks that
                do not learn have none.
        """
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if not per_chunk:
            return metrics
        for k, stage in enumerate(self.stages[:-1], start=1):
            if not stage.learns or stage.reconstructs:
                continue
            self._exit = EarlyExit(self.model, self.stages[:k])
            try:
                with evaluation_mode(self._exit):
                    metrics |= super().evaluate(eval_dataset, ignore_keys, f"{metric_key_prefix}_{stage.name}")
            finally:
                self._exit = None
        return metrics

    def prediction_step(self, model: nn.Module, *args, **kwargs):
        """Trainer's, on the plain model, or on a chunk's readout while `evaluate(per_chunk=True)` reads it."""
        return super().prediction_step(self._exit or model, *args, **kwargs)


class ZeroLockTrainer(ZeroLockMixin, Trainer):
    """transformers.Trainer that trains a PeftModel made with a ZeroLockConfig chunk by chunk.

    Takes Trainer's arguments and `peft_config`; see `ZeroLockMixin`. Source: ZeroLock, arXiv 2608.07974.
    """


def _put(modules: nn.ModuleDict, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under its dotted name, by which Trainer tells norms and biases from what decays."""
    *path, last = name.split(".")
    place: Any = modules
    for part in path:
        if not hasattr(place, part) or part not in place._modules:
            place.add_module(part, nn.Module())
        place = place._modules[part]
    place.register_parameter(last, parameter)


def _ready(model: Any, config: ZeroLockConfig | None, args: Any) -> nn.Module:
    """A model as Trainer takes it: with adapters, and where its chunks are to work."""
    contract.check_places(model, args)
    devices = getattr(args, "devices", None)
    if config is not None:
        contract.check_wrapping(model, config)
        model = get_peft_model(model, config)
    if devices is not None or len({p.device for p in model.parameters()}) > 1:
        contract.check_model(model, devices)
        place(model, model.peft_config[model.active_adapter], devices, args.device)
    return model
