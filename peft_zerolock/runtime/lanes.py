"""Where a stage runs: its device, with streams of its own on CUDA and a share of the cores on the CPU; its queue."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Lane:
    """One stage's device.

    On CUDA the stage computes on one stream and receives on another, so that a copy runs beside the computation. On
    the CPU its thread computes with `threads` threads.
    """

    def __init__(self, device: torch.device, threads: int):
        self.device, self.threads = device, threads
        on_cuda = device.type == "cuda"
        self.compute = torch.cuda.Stream(device) if on_cuda else None
        self.receives = torch.cuda.Stream(device) if on_cuda else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the calling thread the stage's: what it runs, runs on this lane."""
        # The cache of autocast belongs to all threads, and one stage leaving its context would clear another's.
        torch.set_autocast_cache_enabled(False)
        if self.compute is None:
            torch.set_num_threads(self.threads)
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self.compute):
                yield

    def receive(self, values: Any) -> tuple[Any, Callable[[], None]]:
        """Brings tensors in dictionaries here; called by the sender, as soon as they are computed.

        Returns:
            The values on this device, and what the receiver calls before it reads them.
        """
        if self.receives is None:
            return _moved(values, self.device), _nothing
        for device in {tensor.device for tensor in _tensors(values) if tensor.is_cuda}:
            self.receives.wait_event(torch.cuda.current_stream(device).record_event())
        with torch.cuda.stream(self.receives):
            moved = _moved(values, self.device)
            arrived = self.receives.record_event()
        for tensor in _tensors(values):
            if tensor.is_cuda:
                tensor.record_stream(self.receives)

        def wait() -> None:
            assert self.compute is not None
            self.compute.wait_event(arrived)
            for tensor in _tensors(moved):
                tensor.record_stream(self.compute)

        return moved, wait

    def fence(self) -> Callable[[], None]:
        """Marks what the stage has been given to compute so far; the result waits until it is computed."""
        return _nothing if self.compute is None else self.compute.record_event().synchronize


def _nothing() -> None:
    pass


def _moved(values: Any, device: torch.device) -> Any:
    if isinstance(values, Tensor):
        return values.to(device, non_blocking=device.type == "cuda")
    if isinstance(values, Mapping):
        return {name: _moved(value, device) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_moved(value, device) for value in values)
    return values


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping | list | tuple):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(value)


class Closed(Exception):
    """The queue was closed: the run ends."""


class Queue:
    """Entries on their way into one stage, at most `depth` of them; what is no entry takes no room.

    Args:
        condition: one for all queues of a runtime.
    """

    def __init__(self, depth: int, condition: Any):
        self.depth, self.condition = depth, condition
        self.items: deque[tuple[Any, bool]] = deque()
        self.entries, self.closed = 0, False

    def put(self, item: Any, is_entry: bool = True) -> None:
        """Waits for room.

        Raises:
            Closed: the run ends.
        """
        with self.condition:
            self.condition.wait_for(lambda: self.closed or not is_entry or self.entries < self.depth)
            if self.closed:
                raise Closed
            self.items.append((item, is_entry))
            self.entries += is_entry
            self.condition.notify_all()

    def get(self) -> Any:
        """Waits for the next item.

        Raises:
            Closed: the run ends.
        """
        with self.condition:
            self.condition.wait_for(lambda: self.closed or self.items)
            if self.closed:
                raise Closed
            item, is_entry = self.items.popleft()
            self.entries -= is_entry
            self.condition.notify_all()
            return item

    def close(self) -> None:
        """Ends all waiting and lets go of the entries."""
        with self.condition:
            self.closed = True
            self.items.clear()
            self.condition.notify_all()
