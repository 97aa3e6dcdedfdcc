"""How the stages of one model are driven."""

from .concurrent import ConcurrentRuntime
from .sequential import SequentialRuntime, WindowReport
from .trace import Trace

__all__ = ["ConcurrentRuntime", "SequentialRuntime", "Trace", "WindowReport"]
