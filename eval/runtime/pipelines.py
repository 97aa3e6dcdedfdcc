"""Backpropagation in a pipeline of one-threaded gloo processes: GPipe and 1F1B of torch.distributed.pipelining."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from workload import Work, load_stages

from peft_zerolock.objective import TokenObjective, supervised_tokens
from peft_zerolock.stage import Stage

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Part(nn.Module):
    """A stage's blocks with the graph of what it received: hidden states in (token ids in the first), h_k out."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.view = stage.view.module
        self.ports, self.is_first = stage.view.ports, stage.index == 0

    def forward(self, received: Tensor) -> Tensor:
        """`(batch, seq)` ids or `(batch, seq, hidden)` to `(batch, seq, hidden)`."""
        self.ports.last_position_only = True
        self.ports.received = None if self.is_first else received
        ids = received if self.is_first else torch.zeros(received.shape[:2], dtype=torch.long)
        self.view(input_ids=ids)
        left = self.ports.left
        self.ports.clear()
        return left


def loss_of(stage: Stage, work: Work) -> Any:
    """The last stage's loss of h_K `(batch, seq, hidden)`: the model's tail at the supervised positions, in slices."""

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        mask, targets = supervised_tokens({"labels": labels})
        objective = TokenObjective(stage.tail, stage.tail.parameters, stage.config.logits_slice)
        return objective(hidden[mask], targets, work.batch * work.supervised).objective

    return loss


def _serve(rank: int, world: int, port: int, work: Work, orders: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    base, stages = load_stages(work, world)
    part = Part(stages[rank])
    optimizer = torch.optim.AdamW(list(stages[rank].adapters.values()), lr=1e-4)
    ids = torch.zeros(work.batch, work.length, dtype=torch.long)
    hidden = torch.zeros(work.batch, work.length, base.config.hidden_size)
    received = ids if rank == 0 else hidden

    def schedule(name: str) -> Any:
        stage = PipelineStage(
            part, rank, world, torch.device("cpu"), input_args=(received,), output_args=(hidden.requires_grad_(),)
        )
        return SCHEDULES[name](stage, work.micro_batches, loss_fn=loss_of(stages[-1], work))

    schedules = {name: schedule(name) for name in SCHEDULES}
    answers.put("ready")
    while (order := orders.get()) is not None:
        name, windows = order
        dist.barrier()
        start = time.perf_counter()
        if name == "transfer":
            for _ in range(windows):
                _pass_on(rank, world, hidden.detach())
            answers.put((time.perf_counter() - start) / windows)
            continue
        for window in range(windows):
            rows = work.rows(window)
            given = {"target": rows["labels"]} if rank == world - 1 else {}
            schedules[name].step(*([rows["input_ids"]] if rank == 0 else []), **given)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        answers.put(time.perf_counter() - start)
    dist.destroy_process_group()


def _pass_on(rank: int, world: int, hidden: Tensor) -> None:
    """The hidden state goes from the first process to the last."""
    if rank > 0:
        dist.recv(hidden, rank - 1)
    if rank < world - 1:
        dist.send(hidden, rank + 1)


class Pipelines:
    """The processes of a pipeline of two stages, which wait until they are told to work."""

    def __init__(self, work: Work, port: int, world: int = 2):
        context = mp.get_context("spawn")
        self.answers: Any = context.Queue()
        self.orders: list[Any] = [context.Queue() for _ in range(world)]
        self.processes = [
            context.Process(target=_serve, args=(rank, world, port, work, orders, self.answers))
            for rank, orders in enumerate(self.orders)
        ]
        for process in self.processes:
            process.start()
        self._collect()

    def _collect(self) -> list[Any]:
        return [self.answers.get(timeout=1800) for _ in self.processes]

    def seconds(self, name: str, windows: int) -> float:
        """How long a number of update windows takes; for `"transfer"`, how long one hidden state takes to arrive."""
        for orders in self.orders:
            orders.put((name, windows))
        return max(self._collect())

    def close(self) -> None:
        """Ends the processes."""
        for orders in self.orders:
            orders.put(None)
        for process in self.processes:
            process.join()
