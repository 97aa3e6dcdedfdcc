"""A stage: one chunk with its readout as a unit that runs forward, hands its hidden state on and learns by itself."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from .admission import evaluation_mode, output_of
from .blocks import UnsupportedModelError, View, base_model_of, no_router_logits
from .config import CLASSIFICATION_TASKS, ZeroLockConfig
from .noise import StageNoise
from .objective import Terms, TokenObjective, mix, output_consistency, reconstruction, supervised_tokens
from .readout import Tail

LossFunction = Callable[[nn.Module, dict[str, Any], bool, float], tuple[Tensor, Any]]


@dataclass
class Entry:
    """One micro-batch on its way through the stages.

    Attributes:
        inputs: the model's inputs, labels included; every stage needs them.
        count: supervised positions of the whole update window, times the processes where Trainer does so.
        hidden: h_{k-1}, detached, `(batch, seq, hidden)`; None for the first stage.
        grad_scale: loss scale of mixed precision.
        resting: indices of the chunks whose adapters do not learn now; what their readouts have of their own does.
        first_row: number of the micro-batch's first row, counted over the update window from a start that moves on by
            one with each window; settles which rows the chunks below the last learn from.
        window: number of the update window.
        draw: names the micro-batch among all of the run: what its dropout masks are drawn by.
    """

    inputs: dict[str, Any]
    count: Tensor | float
    hidden: Tensor | None = None
    grad_scale: float = 1.0
    resting: frozenset[int] = frozenset()
    first_row: int = 0
    window: int = 0
    draw: str = ""

    @property
    def size(self) -> int:
        """Rows of the micro-batch."""
        return len(self._main)

    @property
    def _main(self) -> Tensor:
        return next(self.inputs[name] for name in ("input_ids", "inputs_embeds") if name in self.inputs)

    @property
    def has_targets(self) -> bool:
        """Whether any of the labels counts."""
        return _has_targets(self.inputs.get("labels"))

    def to(self, device: torch.device) -> "Entry":
        """The same on another device."""
        inputs, count, hidden = send_to_device((self.inputs, self.count, self.hidden), device)
        return replace(self, inputs=inputs, count=count, hidden=hidden)

    def take(self, rows: list[int], share: float) -> "Entry":
        """Some of the rows, which stand for all: they are `share` of those that the window counts."""
        size, index = self.size, torch.tensor(rows, device=self._main.device)

        def some(value: Any) -> Any:
            if not torch.is_tensor(value) or value.dim() == 0 or len(value) != size:
                return value
            return value[index.to(value.device)]

        inputs = {name: some(value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, hidden=some(self.hidden), count=self.count * share)


def _has_targets(labels: Any) -> bool:
    return not torch.is_tensor(labels) or labels.is_floating_point() or bool((labels != -100).any())


def learning_rows(entry: Entry, share: float) -> list[int]:
    """The rows of a micro-batch that are `share` of all rows, however the window is split into micro-batches."""
    # A little more than the product, so that thirds and the like add up to whole numbers.
    before = [math.floor((entry.first_row + i) * share + 1e-9) for i in range(entry.size + 1)]
    return [i for i in range(entry.size) if before[i + 1] > before[i]]


@dataclass
class Stage:
    """One chunk, its readout and what they train.

    Attributes:
        index: 0 to K - 1.
        chunk: indices of its blocks.
        view: the model with this chunk's blocks (and its readout's) as the only real ones.
        tail: for the sliced loss of causal LMs; None where the view's own tail and the model's own loss are used.
        adapters: the chunk's trainable parameters in the model, by name.
        readout: the readout's own trainable parameters, by name; never part of the adapter file.
        copies: the readout's frozen copies of what the last chunk trains in the tail, as it was at the start, by name.
        aliases: the readout's frozen views of what later chunks train, each with the parameter whose values it has.
        row_share: the share of rows that the chunk learns from.
        reach: how many later blocks its readout runs through.
        autocast: context of mixed precision for what runs outside the view's forward.
        noise: where the chunk's dropout masks come from, unless the model is one chunk.
        runs_again: whether readout blocks may run again in the backward pass instead of keeping their activations.
        is_control: it is the last chunk once more, on what the chunks below it made of their input before training.
            Nothing in it is a parameter of the model: `adapters` are by the names of those that they began as, and
            `copies` the frozen ones of the chunks below.
        control: the last stage's control, where there is one.
    """

    index: int
    chunk: range
    is_last: bool
    config: ZeroLockConfig
    view: View
    tail: Tail | None
    adapters: dict[str, nn.Parameter]
    readout: dict[str, nn.Parameter] = field(default_factory=dict)
    copies: dict[str, nn.Parameter] = field(default_factory=dict)
    aliases: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    row_share: float = 1.0
    reach: int = 0
    label_smoothing: float = 0.0
    autocast: Callable[[], AbstractContextManager] = nullcontext
    noise: StageNoise = field(default_factory=StageNoise)
    runs_again: bool = True
    is_control: bool = False
    control: "Stage | None" = None

    @property
    def name(self) -> str:
        """As it is logged: counted from 1, as in the paper."""
        return "control" if self.is_control else f"chunk_{self.index + 1}"

    @property
    def extra(self) -> dict[str, nn.Parameter]:
        """What it trains that is no parameter of the model."""
        return self.adapters if self.is_control else self.readout

    @property
    def learns(self) -> bool:
        """Whether the chunk has anything to train."""
        return bool(self.adapters)

    @property
    def device(self) -> torch.device:
        """Where all that it reads lies."""
        return next(self.view.module.parameters()).device

    def trees(self) -> dict[str, nn.Module]:
        """The module trees that belong to the stage."""
        return {"view": self.view.module} | ({} if self.tail is None else self.tail.modules())

    def pass_on(self, entry: Entry) -> Entry:
        """Runs the chunk without a graph and without its readout; what the next stage gets."""
        sent: list[Tensor] = []
        entry = entry.to(self.device)
        self._forward_only(entry, sent.append)
        return replace(entry, hidden=sent[0])

    def step(self, entry: Entry, send: Callable[[Tensor], None] | None, loss_of: LossFunction) -> Terms | None:
        """Runs the chunk on a micro-batch; the hidden state is sent on before the readout runs.

        Args:
            send: called with the detached h_k; None for the last stage.
            loss_of: the model's own loss of a view on a micro-batch, scaled for the window of which its rows are a
                share, and its outputs where they are asked for. Used where there is no sliced tail.

        Returns:
            The local objective with its graph, or None for a chunk below the last that learns from none of the rows.
        """
        entry = entry.to(self.device)
        for alias, source in self.aliases:
            alias.data = source.data
        if self.is_last or (self.learns and self.row_share == 1):
            return self._learn(entry, send, loss_of)
        rows = self._rows(entry)
        self.view.ports.checkpoint_readout = self.runs_again and self._outgrows(len(rows), entry.size)
        if len(rows) == entry.size:
            return self._learn(entry.take(rows, self.row_share), send, loss_of)
        assert send is not None
        if not rows:
            self._forward_only(entry, send)
            return None
        others = sorted(set(range(entry.size)) - set(rows))
        passed: list[Tensor] = []
        self._forward_only(entry.take(others, 1.0), passed.append)

        def send_all(hidden: Tensor) -> None:
            whole = hidden.new_empty(entry.size, *hidden.shape[1:])
            whole[torch.tensor(rows, device=hidden.device)] = hidden
            whole[torch.tensor(others, device=hidden.device)] = passed.pop()
            send(whole)

        return self._learn(entry.take(rows, self.row_share), send_all, loss_of)

    def _rows(self, entry: Entry) -> list[int]:
        """Which rows a chunk below the last learns from; none where they have no targets."""
        rows = learning_rows(entry, self.row_share) if self.learns else []
        labels = entry.inputs.get("labels")
        return rows if rows and _has_targets(labels[rows] if torch.is_tensor(labels) else labels) else []

    def _outgrows(self, learning: int, size: int) -> bool:
        """Whether so small a micro-batch does not allow the share that keeps activations within the chunk's."""
        rounding = 1.25
        alone = size * len(self.chunk)
        return self.config.readout_rows == "auto" and learning * (len(self.chunk) + self.reach) > rounding * alone

    def _learn(self, entry: Entry, send: Callable[[Tensor], None] | None, loss_of: LossFunction) -> Terms:
        self.noise.begin(f"{entry.draw}/{self.name}")
        ports = self.view.ports
        ports.received, ports.send = entry.hidden, send
        rests = self.index in entry.resting
        ports.cut = rests and bool(self.readout)
        learns = bool(self.readout) if rests else self.learns
        try:
            with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                if self.reconstructs:
                    return self._reconstruction_terms(entry)
                return self._output_terms(entry, loss_of) if self.tail is None else self._token_terms(entry)
        finally:
            ports.clear()

    def _forward_only(self, entry: Entry, send: Callable[[Tensor], None]) -> None:
        self.noise.begin(f"{entry.draw}/{self.name}/passed")
        ports = self.view.ports
        ports.received, ports.send, ports.skip_readout = entry.hidden, send, True
        try:
            with torch.no_grad():
                self._forward(entry)
        finally:
            ports.skip_readout = False
            ports.clear()

    def clip(self, limit: float) -> Tensor:
        """Clips the gradients of the adapters, and those of the readout, to a norm each; returns the adapters'."""
        nn.utils.clip_grad_norm_(list(self.readout.values()), limit)
        return nn.utils.clip_grad_norm_(list(self.adapters.values()), limit)

    def _forward(self, entry: Entry, **settings: bool) -> Any:
        ports = self.view.ports
        ports.last_position_only = self.tail is not None
        return self.view.module(**_without_labels(entry.inputs) | settings)

    def _previous(self, entry: Entry) -> Any:
        """The readout of what the chunk received, without gradient: p_{k-1}."""
        ports = self.view.ports
        main = (ports.entered, ports.left, ports.read)
        assert ports.entered is not None
        ports.received, ports.send, ports.skip_chunk = ports.entered.detach(), None, True
        try:
            with torch.no_grad(), evaluation_mode(self.view.module):
                return self._forward(entry, **no_router_logits(self.view.module)), ports.read
        finally:
            ports.skip_chunk = False
            ports.entered, ports.left, ports.read = main

    def read(self, entry: Entry) -> Tensor:
        """What is handed to the model's tail `(batch, seq, hidden)`.

        Args:
            entry: with h_k for the readout of a chunk below the last (see `pass_on`), with h_{K-1} for the last stage.
        """
        ports, entry = self.view.ports, entry.to(self.device)
        ports.received, ports.skip_chunk = entry.hidden, not self.is_last
        try:
            self._forward(entry, **no_router_logits(self.view.module))
            assert ports.read is not None
            return ports.read
        finally:
            ports.skip_chunk = False
            ports.clear()

    @property
    def reconstructs(self) -> bool:
        """Whether the chunk learns to keep what it was given, in place of the task."""
        return self.config.objective == "reconstruction" and not self.is_last

    @property
    def has_consistency(self) -> bool:
        """Whether the chunk's objective has a consistency term."""
        used = (self.learns and not self.reconstructs) or self.is_last
        return used and self.config.alpha < 1 and (self.index > 0 or self.config.consistency_first)

    def _reconstruction_terms(self, entry: Entry) -> Terms:
        self._forward(entry, **no_router_logits(self.view.module))
        ports = self.view.ports
        assert ports.read is not None and ports.entered is not None
        return reconstruction(ports.read, ports.entered.detach(), entry.inputs, entry.count, self.tail is not None)

    def _token_terms(self, entry: Entry) -> Terms:
        assert self.tail is not None
        outputs = self._forward(entry)
        mask, targets = supervised_tokens(entry.inputs)
        read = self.view.ports.read
        assert read is not None
        hidden, previous = read[mask], None
        if self.has_consistency:
            previous = self._previous(entry)[1][mask]
        objective = TokenObjective(
            self.tail,
            self.tail.parameters,
            self.config.logits_slice or len(targets),
            self.config.alpha,
            self.config.consistency,
            self.label_smoothing,
        )
        with self.autocast():
            terms = objective(hidden, self.tail.restrict(targets), entry.count, previous, entry.grad_scale)
        balance = outputs.get("aux_loss") if hasattr(outputs, "get") else None
        if balance is not None:
            # A mixture of experts balances the routers that ran: this chunk's.
            balance = balance_weight(self.view.module) * balance
            terms = Terms(terms.objective + balance, terms.task + balance.detach(), terms.consistency)
        return terms

    def _output_terms(self, entry: Entry, loss_of: LossFunction) -> Terms:
        ports = self.view.ports
        ports.last_position_only = False
        share = 1.0 if self.is_last else self.row_share
        task, outputs = loss_of(self.view.module, dict(entry.inputs), self.has_consistency, share)
        if not self.has_consistency:
            return mix(task, None, 1.0)
        previous = output_of(self._previous(entry)[0])
        logits, labels = output_of(outputs), entry.inputs.get("labels")
        causal = self.config.task_type not in CLASSIFICATION_TASKS
        if causal and labels is not None:
            labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        aligned = labels if labels is not None and labels.dim() == logits.dim() - 1 and logits.dim() == 3 else None
        kind = base_model_of(self.view.module).config.problem_type if logits.dim() == 2 else None
        consistency = output_consistency(logits, previous, aligned, entry.count, self.config.consistency, kind)
        return mix(task, consistency, self.config.alpha)


def with_control(stages: list[Stage]) -> list[Stage]:
    """The stages, and the last one's control where there is one."""
    return stages if stages[-1].control is None else [*stages, stages[-1].control]


def balance_weight(model: nn.Module) -> float:
    """The weight of a mixture of experts' balance loss, by whichever name the model has it.

    Raises:
        UnsupportedModelError: it has none of the known ones.
    """
    base = base_model_of(model)
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(base, name):
            return getattr(base, name)
    raise UnsupportedModelError(model, "the weight of its balance loss is unknown; set output_router_logits=False.")


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}
