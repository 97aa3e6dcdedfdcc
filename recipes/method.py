"""The training method as options: ZeroLock, or backpropagation with plain LoRA for comparison."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models import block_linears
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import get_last_checkpoint

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, ZeroLockTrainingArguments
from peft_zerolock.checkpoint import check_resumable, newest_complete
from peft_zerolock.hub import check_hub_target

logger = logging.getLogger(__name__)


@dataclass
class MethodArguments:
    """LoRA and how the model is cut into chunks."""

    method: Literal["zerolock", "bp"] = field(
        default="zerolock", metadata={"help": "zerolock, or bp: stock Trainer and LoraConfig (chunk options unused)."}
    )
    r: int = field(default=8, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of LoRA: lora_alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before LoRA."})
    target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules that get LoRA; default: all linear layers inside the blocks."}
    )
    num_chunks: int | None = field(default=None, metadata={"help": "Number of chunks; 2 where nothing is given."})
    chunk_sizes: list[int] | None = field(default=None, metadata={"help": "Blocks per chunk, first to last."})
    train_chunks: list[int] | None = field(
        default=None, metadata={"help": "Chunks that learn: 1 to K, or -1 for the last; default: all."}
    )
    alpha: float = field(default=1.0, metadata={"help": "Weight of the task term in (0, 1]; the rest is consistency."})
    consistency: Literal["forward", "reverse"] = field(
        default="forward", metadata={"help": "Direction of the consistency term."}
    )
    consistency_first: bool = field(default=True, metadata={"help": "A consistency term in the first chunk too."})
    readout: Literal["auto", "lm_head", "adapter", "bottleneck", "vocab", "blocks"] = field(
        default="auto", metadata={"help": "What turns the hidden state after a chunk into logits."}
    )
    readout_dim: int | None = field(default=None, metadata={"help": "Width or rank of the readout."})
    readout_blocks: str = field(
        default="all",
        metadata={"help": "Later blocks in a readout of kind blocks: a number, a share below 1, or all."},
    )
    readout_blocks_from: Literal["auto", "even", "next", "last"] = field(
        default="auto", metadata={"help": "Which later blocks a readout of kind blocks takes."}
    )
    readout_weights: Literal["own", "current"] = field(
        default="own", metadata={"help": "What adapts those blocks: a LoRA of their own, or what later chunks learnt."}
    )
    readout_rows: str = field(
        default="auto", metadata={"help": "Share of the rows with a local loss below the last chunk, or auto."}
    )
    readout_vocab: int | None = field(
        default=None, metadata={"help": "For vocab: how many of the most frequent answer tokens; default: 4096."}
    )
    readout_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the readouts; default: the adapters'."}
    )
    readout_warmup_ratio: float = field(
        default=0.0, metadata={"help": "Share of the steps in which only the readouts learn."}
    )
    logits_slice: int | None = field(
        default=256, metadata={"help": "Supervised tokens through the head at a time; null: the model's own loss."}
    )
    objective: Literal["task", "reconstruction"] = field(
        default="task", metadata={"help": "What the chunks below the last learn; reconstruction is LoPT's."}
    )
    control: bool = field(
        default=False, metadata={"help": "Train the last chunk only alongside; keep the better of the two."}
    )

    def __post_init__(self):
        self.readout_blocks, self.readout_rows = map(_number_or_word, (self.readout_blocks, self.readout_rows))
        if self.method == "zerolock":  # its checks, before anything is loaded
            ZeroLockConfig(**self.chunk_options())

    def chunk_options(self) -> dict[str, Any]:
        """ZeroLockConfig's arguments beside LoRA's."""
        return {name: getattr(self, name) for name in CHUNK_OPTIONS}


def _number_or_word(text: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


LORA_OPTIONS = ("r", "lora_alpha", "lora_dropout")
CHUNK_OPTIONS = (
    "num_chunks",
    "chunk_sizes",
    "train_chunks",
    "alpha",
    "consistency",
    "consistency_first",
    "readout",
    "readout_dim",
    "readout_blocks",
    "readout_blocks_from",
    "readout_weights",
    "readout_rows",
    "readout_vocab",
    "readout_learning_rate",
    "readout_warmup_ratio",
    "logits_slice",
    "objective",
    "control",
)


def make_config(
    options: MethodArguments, model: PreTrainedModel, task_type: str, modules_to_save: list[str] | None = None
) -> LoraConfig:
    """The adapter's configuration: a ``ZeroLockConfig``, or a plain ``LoraConfig`` for ``--method bp``.

    Args:
        options: the method's options.
        model: the base model, for the default targets.
        task_type: "SEQ_CLS", "CAUSAL_LM" ...
        modules_to_save: modules trained and saved whole.

    Raises:
        ValueError: an option is out of its range.
    """
    shared: dict[str, Any] = {name: getattr(options, name) for name in LORA_OPTIONS}
    shared["target_modules"] = options.target_modules or block_linears(model)
    shared["modules_to_save"] = modules_to_save or None
    shared["task_type"] = task_type
    if options.method == "bp":
        return LoraConfig(**shared)
    return ZeroLockConfig(**shared, **options.chunk_options())


def make_trainer(
    options: MethodArguments,
    model: PreTrainedModel,
    config: LoraConfig,
    args: ZeroLockTrainingArguments,
    **kwargs: Any,
) -> Trainer:
    """``ZeroLockTrainer``, or the stock ``Trainer`` on a PeftModel for ``--method bp``.

    Args:
        options: the method's options.
        model: the base model.
        config: from :func:`make_config`.
        args: training arguments; a Hub repository to push to is checked here, before any work.
        kwargs: further arguments of ``transformers.Trainer``.

    Raises:
        ValueError: the model cannot be cut as asked, or the Hub repository cannot be pushed to.
    """
    check_hub_target(args)
    if options.method == "bp":
        logger.info("method bp: stock Trainer and LoraConfig; the chunk options are not used.")
        return Trainer(model=get_peft_model(model, config), args=args, **kwargs)
    return ZeroLockTrainer(model=model, args=args, peft_config=config, **kwargs)


def checkpoint_to_resume(trainer: Trainer) -> str | None:
    """What ``--resume_from_checkpoint`` asks for, checked: a folder; "true" or "last" take the newest complete one.

    Raises:
        ValueError: there is no complete checkpoint, or it was made with another method or other chunk settings.
    """
    asked = trainer.args.resume_from_checkpoint
    if not asked or asked.lower() in ("false", "no"):
        return None
    newest = asked.lower() in ("true", "last")
    if not isinstance(trainer, ZeroLockTrainer):
        return _stock_checkpoint(trainer.args.output_dir, None if newest else asked)
    with trainer.args.main_process_first(local=False):
        folder = newest_complete(trainer.args.output_dir) if newest else asked
    check_resumable(folder, trainer.zerolock_config)
    return folder


def _stock_checkpoint(output_dir: str, folder: str | None) -> str:
    if folder is None:
        folder = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    if folder is None or not Path(folder, "trainer_state.json").is_file():
        raise ValueError(f"there is no checkpoint to resume from in {folder or output_dir!r}. Start afresh.")
    if Path(folder, "zerolock_config.json").is_file():
        raise ValueError(f"{folder!r} was trained with --method zerolock. Resume with that method, or start afresh.")
    return folder
