"""A stage's own random numbers.

PyTorch has one generator for all threads of the CPU, so what a stage drew from it would depend on when the others ran.
A stage's dropout masks depend on the run's seed, the micro-batch, the stage and the module alone: they are the same in
every runtime, after resuming, and where activation checkpointing runs a forward pass again.
"""

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from .admission import dry_batch
from .blocks import base_model_of

if TYPE_CHECKING:
    from .stage import Stage


class StageNoise:
    """Draws the dropout masks of one stage."""

    def __init__(self) -> None:
        self.draw = ""
        self.calls: Counter[tuple[str, bool]] = Counter()
        self.generators: dict[torch.device, torch.Generator] = {}

    def begin(self, draw: str) -> None:
        """A forward pass begins; `draw` names it among all of the run."""
        self.draw = draw
        self.calls.clear()

    @torch.compiler.disable
    def drop(self, values: Tensor, p: float, module: str) -> Tensor:
        """Sets each value to zero with probability `p` and divides the others by `1 - p`."""
        # Inside a backward pass only checkpointing runs a module: the calls of its forward pass, again (several times
        # where one checkpoint is inside another).
        repeats = torch._C._current_graph_task_id() != -1
        call = self.calls[module, repeats]
        self.calls[module, repeats] += 1
        if repeats:
            call %= self.calls[module, False]
        if values.device not in self.generators:
            self.generators[values.device] = torch.Generator(values.device)
        generator = self.generators[values.device]
        digest = blake2b(f"{self.draw}/{module}/{call}".encode(), digest_size=4).digest()
        generator.manual_seed(int.from_bytes(digest, "big"))
        dropped = torch.empty(values.shape, dtype=torch.bool, device=values.device).bernoulli_(p, generator=generator)
        return (values * (1 / (1 - p) if p < 1 else 0.0)).masked_fill(dropped, 0.0)


class StageDropout(nn.Dropout):
    """nn.Dropout whose masks come from its stage.

    Args:
        p: the probability of a zero.
        noise: the stage's.
        name: the module's, unlike any other of the stage.
    """

    def __init__(self, p: float, noise: StageNoise, name: str):
        super().__init__(p)
        self.noise, self.name = noise, name

    def forward(self, values: Tensor) -> Tensor:
        """Values of any shape; as they are in evaluation mode."""
        return self.noise.drop(values, self.p, self.name) if self.training and self.p > 0 else values


def own_dropout(trees: dict[str, nn.Module], noise: StageNoise) -> None:
    """Puts a StageDropout in the place of every nn.Dropout of a stage's module trees."""
    made: dict[int, StageDropout] = {}
    for prefix, tree in trees.items():
        for path, parent in list(tree.named_modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Dropout:
                    own = made.setdefault(id(child), StageDropout(child.p, noise, f"{prefix}.{path}.{name}"))
                    parent._modules[name] = own.train(child.training)


def draws_elsewhere(stages: Iterable["Stage"], model: nn.Module) -> list[str]:
    """Names of the stages whose modules draw from PyTorch's global generators in training mode.

    Dropout inside an attention function and NEFTune do so. A dry batch runs through the views, without gradient.
    """
    found = []
    batch = dry_batch(base_model_of(model))
    hidden: Tensor | None = None
    for stage in stages:
        ports = stage.view.ports
        inputs, ports.received = send_to_device((batch, hidden), stage.device)
        ports.last_position_only = stage.tail is not None
        with torch.random.fork_rng(), torch.no_grad():
            before = _states()
            stage.view.module(**inputs)
            if any(not torch.equal(one, other) for one, other in zip(before, _states(), strict=True)):
                found.append(stage.name)
        hidden = ports.left
        ports.clear()
    return found


def _states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
