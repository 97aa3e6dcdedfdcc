"""How the stages of one model are driven."""

from .sequential import SequentialRuntime, WindowReport

__all__ = ["SequentialRuntime", "WindowReport"]
