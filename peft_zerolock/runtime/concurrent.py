"""Several devices in one process: the stages work at the same time, each on the micro-batch that has reached it.

The scheme is the paper's ("The system"): a hidden state leaves for the next stage before the local backward pass, only
a few of them wait between two stages, and a stage takes its optimizer step at the end of its own update window without
waiting for the others. What a chunk learns depends on what it is sent and on its own earlier steps alone, so timing
changes no result.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..optimizer import Changes, StagedOptimizer
from ..stage import Entry, LossFunction, Stage
from .lanes import Closed, Lane, Queue
from .sequential import WindowReport, learn, total_norm
from .trace import Trace


@dataclass(kw_only=True)
class _Ticket:
    """What all stages do once, and how many have not done it yet."""

    left: int
    fences: list[Callable[[], None]] = field(default_factory=list)


@dataclass(kw_only=True)
class _Learn(_Ticket):
    """One micro-batch."""

    number: int
    loss_of: LossFunction
    report: WindowReport


@dataclass(kw_only=True)
class _Update(_Ticket):
    """The end of an update window."""

    number: int
    limit: float
    changes: Changes
    norms: dict[str, Tensor] = field(default_factory=dict)


class ConcurrentRuntime:
    """One worker thread a stage. Threads start with the first micro-batch and end with `close`.

    The first exception of any stage ends all of them; it is raised in the calling thread by the next call, with a note
    that names the stage.

    Args:
        stages: first to last, then the last one's control where there is one.
        devices: one a stage; on the CPU the stages share the process's threads evenly.
        backward: runs the backward pass of a scalar.
        depth: entries that wait before a stage, at most.
        trace: where the workers write down what they do.
    """

    def __init__(
        self,
        stages: list[Stage],
        devices: list[torch.device],
        backward: Callable[[Tensor], None],
        depth: int,
        trace: Trace | None = None,
    ):
        self.stages, self.devices, self.backward, self.depth, self.trace = stages, devices, backward, depth, trace
        self.optimizer: StagedOptimizer | None = None
        self._condition = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._lanes: list[Lane] = []
        self._queues: list[Queue] = []
        self._reset()

    def _reset(self) -> None:
        self._error: BaseException | None = None
        self._owed: deque[_Learn] = deque()
        self._updates: deque[_Update] = deque()
        self._latest: _Update | None = None
        self._limit = float("inf")
        self._numbers = {_Learn: 0, _Update: 0}
        self._entries = 0

    # ---- the calling thread's side ----

    def begin_window(self) -> None:
        """No micro-batch of the window has been submitted yet."""
        self._entries = 0

    @property
    def is_idle(self) -> bool:
        """Whether the update window gave no gradient at all."""
        return self._entries == 0

    def finished(self, stage: Stage) -> None:
        """Nothing: gradients stay in this process."""

    def submit(self, entry: Entry, loss_of: LossFunction, ends_window: bool = True) -> WindowReport | None:
        """Gives one micro-batch to the first stage; waits only for room.

        Returns:
            The oldest report that all stages have finished and that was not returned yet; None if there is none.

        Raises:
            BaseException: what ended a stage.
        """
        self._check()
        self._start()
        ticket = _Learn(
            left=len(self.stages), number=self._number(_Learn), loss_of=loss_of, report=WindowReport(entry.window)
        )
        self._entries += 1
        self._owed.append(ticket)
        self._send(0, ticket, entry)
        return self._take()

    def clip(self, limit: float) -> Tensor:
        """Sets to what the stages clip their gradients; returns the norm of the newest finished window."""
        self._limit = limit
        if self._latest is None:
            return torch.zeros(())
        for fence in self._latest.fences:
            fence()
        return total_norm([self._latest.norms[stage.name] for stage in self.stages if not stage.is_control])

    def end_window(self, changes: Changes) -> None:
        """Tells each stage to take its step when it has finished the micro-batches submitted so far."""
        self._check()
        self._start()
        update = _Update(left=len(self.stages), number=self._number(_Update), limit=self._limit, changes=changes)
        self._updates.append(update)
        self._send(0, update)

    @property
    def windows_in_flight(self) -> int:
        """Update windows that have ended here but not yet in the last stage."""
        with self._condition:
            last = self.stages[-1].name
            return sum(last not in update.norms for update in self._updates)

    def drain(self) -> list[WindowReport]:
        """Waits until every stage has done everything.

        Returns:
            The reports that were not returned yet, oldest first.

        Raises:
            BaseException: what ended a stage.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._error or not (self._updates or any(t.left for t in self._owed)))
        self._check()
        reports = []
        while (report := self._take()) is not None:
            reports.append(report)
        for lane in self._lanes:
            if lane.compute is not None:
                lane.compute.synchronize()
        return reports

    @contextmanager
    def rested(self):
        """While the stages have nothing to do, the calling thread has all of the process's threads to itself."""
        if not self._workers:
            yield
            return
        share = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(share)

    def close(self) -> None:
        """Ends the workers, each after what it is doing, and forgets what they had not done."""
        if not self._workers:
            return
        for queue in self._queues:
            queue.close()
        for worker in self._workers:
            worker.join()
        self._workers, self._queues, self._lanes = [], [], []
        torch.set_num_threads(self._threads)
        self._drop_gradients()
        self._reset()
        if self.trace is not None:
            self.trace.write()

    def _check(self) -> None:
        if self._error is not None:
            error = self._error
            self.close()
            raise error

    def _start(self) -> None:
        if self._workers:
            return
        if self.trace is not None:
            self.trace.begin()
        self._threads = torch.get_num_threads()
        share = max(1, self._threads // max(1, sum(device.type == "cpu" for device in self.devices)))
        self._drop_gradients()
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._lanes = [Lane(device, share) for device in self.devices]
        self._queues = [Queue(self.depth, self._condition) for _ in self.stages]
        for index, stage in enumerate(self.stages):
            run = contextvars.copy_context().run
            worker = threading.Thread(target=run, args=(self._work, index), name=f"zerolock {stage.name}", daemon=True)
            self._workers.append(worker)
            worker.start()
        torch.set_num_threads(share)

    def _number(self, kind: type[_Ticket]) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _take(self) -> WindowReport | None:
        with self._condition:
            if not self._owed or self._owed[0].left:
                return None
            ticket = self._owed.popleft()
        for fence in ticket.fences:
            fence()
        return ticket.report

    def _drop_gradients(self) -> None:
        for stage in self.stages:
            _drop_gradients(stage)

    # ---- either side ----

    def _send(self, index: int, ticket: _Ticket, entry: Entry | None = None) -> None:
        queue = self._queues[index]
        arrived: Callable[[], None] | None = None
        if entry is not None:
            moved, arrived = self._lanes[index].receive([entry.inputs, entry.count, entry.hidden])
            entry = replace(entry, inputs=moved[0], count=moved[1], hidden=moved[2])
        try:
            queue.put((ticket, entry, arrived), is_entry=entry is not None)
        except Closed:
            if threading.current_thread() in self._workers:
                raise
            self._check()
        if self.trace is not None:
            self.trace.depth(self.stages[index].name, queue.entries)

    # ---- a worker's side ----

    def _work(self, index: int) -> None:
        stage, lane, queue = self.stages[index], self._lanes[index], self._queues[index]
        before: Callable[[], None] | None = None
        try:
            with lane.entered():
                while True:
                    ticket, entry, arrived = queue.get()
                    if arrived is None:
                        self._update(index, ticket)
                    else:
                        arrived()
                        self._learn(index, ticket, entry)
                    del entry
                    fence = lane.fence()
                    if before is not None:
                        before()  # a worker gets no further than one micro-batch ahead of its device
                    before = fence
                    self._finish(ticket, fence)
        except Closed:
            pass
        except BaseException as error:
            self._fail(stage, lane, error)

    def _learn(self, index: int, ticket: _Learn, entry: Entry) -> None:
        stage = self.stages[index]
        did = self._spans(index, f"micro-batch {ticket.number}")
        if stage.control is not None:
            self._send(index + 1, ticket, replace(entry, hidden=None))

        def send(hidden: Tensor) -> None:
            did("forward")
            self._send(index + 1, ticket, replace(entry, hidden=hidden))
            did("send")

        learn(stage, entry, None if stage.is_last else send, ticket.loss_of, self.backward, ticket.report, did)

    def _update(self, index: int, update: _Update) -> None:
        stage = self.stages[index]
        if index + 1 < len(self.stages):
            self._send(index + 1, update)
        did = self._spans(index, f"window {update.number}")
        norm = stage.clip(update.limit)
        assert self.optimizer is not None
        self.optimizer.step_chunk(stage.name, update.changes)
        _drop_gradients(stage)
        did("update")
        with self._condition:
            update.norms[stage.name] = norm

    def _spans(self, index: int, what: str) -> Callable[[str], None]:
        if self.trace is None:
            return lambda part: None
        return self.trace.spans(self.stages[index].name, what, lambda: self._lanes[index].fence()())

    def _finish(self, ticket: Any, fence: Callable[[], None]) -> None:
        with self._condition:
            ticket.fences.append(fence)
            ticket.left -= 1
            if ticket.left == 0 and isinstance(ticket, _Update):
                self._updates.remove(ticket)
                self._latest = ticket
            self._condition.notify_all()

    def _fail(self, stage: Stage, lane: Lane, error: BaseException) -> None:
        with self._condition:
            if self._error is None:
                error.add_note(f"It happened in {stage.name} of {len(self.stages)}, on {lane.device}.")
                self._error = error
        for queue in self._queues:
            queue.close()


def _drop_gradients(stage: Stage) -> None:
    for parameter in (*stage.adapters.values(), *stage.readout.values()):
        parameter.grad = None
