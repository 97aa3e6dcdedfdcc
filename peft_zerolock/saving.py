"""What a trainer saves and reads back: adapters and checkpoints that are complete, cards that can be published."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from . import checkpoint, hub
from .config import ZeroLockConfig
from .control import Control

if TYPE_CHECKING:
    _Trainer = Trainer  # what the mixin is mixed into
else:
    _Trainer = object


class SavingMixin(_Trainer):
    """The part of `ZeroLockMixin` that saves, resumes and pushes."""

    model: Any
    optimizer: Any
    train_dataset: Any
    args: Any
    _staging: str | None = None
    _control: Control | None

    @property
    def zerolock_config(self) -> ZeroLockConfig:
        """The active adapter's configuration."""
        return self.model.peft_config[self.model.active_adapter]

    if TYPE_CHECKING:

        @property
        def readouts(self) -> dict[str, nn.Parameter]: ...

        def _settle_control(self) -> None: ...

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Trains; `resume_from_checkpoint=True` takes the newest complete checkpoint.

        Raises:
            ValueError: the checkpoint is damaged, there is none, or it was trained with other chunk settings.
        """
        if resume_from_checkpoint is True:
            with self.args.main_process_first(local=False):
                resume_from_checkpoint = checkpoint.newest_complete(self.args.output_dir)
        if resume_from_checkpoint:
            checkpoint.check_resumable(resume_from_checkpoint, self.zerolock_config)
        return super().train(resume_from_checkpoint or None, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint_folder)
        if checkpoint_folder is not None:
            checkpoint.load_tensors(checkpoint_folder, checkpoint.READOUTS_NAME, self.readouts)

    def _get_output_dir(self, trial) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        self._settle_control()
        run_dir = self._get_output_dir(trial)
        name = f"checkpoint-{self.state.global_step}"
        final = os.path.join(run_dir, name)
        writes, wait = self.args.should_save, self.accelerator.wait_for_everyone
        with checkpoint.staged(run_dir, name, writes, wait) as temporary:
            self._staging = temporary
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            written = os.path.join(temporary, name)
            if self.state.best_model_checkpoint == written:
                self.state.best_model_checkpoint = final
            if writes:
                checkpoint.save_tensors(written, checkpoint.READOUTS_NAME, self.readouts)
                if self._control is not None:
                    gains = {"gains": torch.tensor(self._control.gains, dtype=torch.float64)}
                    checkpoint.save_tensors(written, checkpoint.CONTROL_NAME, gains)
                self.state.save_to_json(os.path.join(written, TRAINER_STATE_NAME))
        if self.args.push_to_hub:
            super()._push_from_checkpoint(final)
        if writes:
            rotate_checkpoints(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Called while a checkpoint is being written; it is pushed when it is complete."""

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Trainer's, by way of a temporary folder: a failed save leaves the earlier files as they were."""
        if not self.args.should_save:
            return
        with checkpoint.replaced_files(output_dir or self.args.output_dir) as temporary:
            super()._save(temporary, state_dict)
            self._clean_card(temporary)

    def create_model_card(self, *args, **kwargs) -> None:
        """Trainer's card, without local paths and with the tags of this method."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            self._clean_card(self.args.output_dir)

    def _clean_card(self, folder: str) -> None:
        base = self.zerolock_config.base_model_name_or_path
        hub.clean_card(folder, base, paths=[path for path in (base, self.args.output_dir) if path])

    def push_to_hub(self, *args, **kwargs):
        """Trainer's; where it fails, the error says where the adapter is and how to push it again.

        Raises:
            RuntimeError: the Hub or the connection failed.
        """
        with hub.explain_failed_push(self.args.output_dir, self.hub_model_id or str(self.args.hub_model_id)):
            return super().push_to_hub(*args, **kwargs)
