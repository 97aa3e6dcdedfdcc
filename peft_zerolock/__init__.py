"""Train LoRA adapters chunk by chunk, without update locking (ZeroLock, arXiv 2608.07974)."""

from .arguments import ZeroLockTrainingArguments
from .blocks import UnsupportedModelError
from .config import ZeroLockConfig
from .loading import load_adapter
from .trainer import ZeroLockMixin, ZeroLockTrainer

__version__ = "0.1.0"

__all__ = [
    "UnsupportedModelError",
    "ZeroLockConfig",
    "ZeroLockMixin",
    "ZeroLockTrainer",
    "ZeroLockTrainingArguments",
    "__version__",
    "load_adapter",
]
