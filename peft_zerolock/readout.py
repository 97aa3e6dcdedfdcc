"""The readouts: what turns the hidden state after a chunk into logits (paper, "Readout", "Readout adapter")."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from .blocks import BlockMap, View, base_model_of, no_router_logits
from .config import ZeroLockConfig
from .partition import sample_later_blocks

DEFAULT_DIM = 64
DEFAULT_VOCAB = 4096


class ResidualAdapter(nn.Module):
    """A residual MLP on hidden states `(..., hidden)`, the identity at the start."""

    def __init__(self, hidden_size: int, width: int, device: torch.device):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, device=device)
        self.down = nn.Linear(hidden_size, width, device=device)
        self.up = nn.Linear(width, hidden_size, device=device)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        update = self.up(F.gelu(self.down(self.norm(hidden.float()))))
        return hidden + update.to(hidden.dtype)


class Decoder(nn.Module):
    """Turns h_k back into h_{k-1}, `(..., hidden)`, for the reconstruction objective (LoPT, arXiv 2605.04913)."""

    def __init__(self, hidden_size: int, width: int | None, device: torch.device):
        super().__init__()
        width = width or max(hidden_size // 4, 1)
        self.norm = nn.LayerNorm(hidden_size, device=device)
        self.down = nn.Linear(hidden_size, width, device=device)
        self.up = nn.Linear(width, hidden_size, device=device)
        for layer in (self.down, self.up):
            nn.init.xavier_uniform_(layer.weight, gain=0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(self.norm(hidden.float())))).to(hidden.dtype)


class BottleneckHead(nn.Module):
    """A trainable projection of rank `rank` from hidden states `(..., hidden)` to logits `(..., vocab)`.

    Starts as the best approximation of this rank to the model's head, behind a root-mean-square norm.
    """

    def __init__(self, head: nn.Module, rank: int):
        super().__init__()
        weight = _base_layer(head).weight.detach().float()
        rank = min(rank, *weight.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            left, scale, right = torch.svd_lowrank(weight, q=rank, niter=2)
        self.gain = nn.Parameter(torch.ones(weight.shape[1], device=weight.device))
        self.down = nn.Parameter(right * scale.sqrt())
        self.up = nn.Parameter(left * scale.sqrt())

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:]) * self.gain
        return normed @ self.down @ self.up.T


class RestrictedHead(nn.Module):
    """The model's frozen head, computed for the token ids in `rows` only."""

    def __init__(self, head: nn.Module):
        super().__init__()
        layer = _base_layer(head)
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.rows = torch.empty(0, dtype=torch.long)

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.rows].to(hidden.dtype)
        return F.linear(hidden, self.weight[self.rows].to(hidden.dtype), bias)


def take_any_dtype(module: Any) -> None:
    """Lets a float32 module stand behind half-precision hidden states: its inputs are cast to its weights' type."""
    if not getattr(module, "_zerolock_casts_input", False):
        module.register_forward_pre_hook(_cast_input)
        module._zerolock_casts_input = True


def _cast_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None or _autocasts(weight.device.type):
        return args
    return tuple(a.to(weight.dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in args)


def _autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def give_dtype(module: Any, dtype: torch.dtype) -> None:
    """Casts a module's output, where it is one floating-point tensor, to the type that the model goes on with."""

    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.is_tensor(output) and output.is_floating_point() and not _autocasts(output.device.type):
            return output.to(dtype)
        return output

    if not getattr(module, "_zerolock_casts_output", False):
        module.register_forward_hook(cast)
        module._zerolock_casts_output = True


def _base_layer(module: Any) -> Any:
    module = getattr(module, "original_module", module)
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


class Tail:
    """Turns hidden states of single positions into logits, by the model's own tail or what replaces it.

    Args:
        view: a view without real blocks.
        bottleneck: a head used in the tail's place.
        restricted: the head inside the view that computes only some tokens.
        vocab: token ids that are always among them.
    """

    def __init__(
        self,
        view: View | None,
        bottleneck: BottleneckHead | None = None,
        restricted: RestrictedHead | None = None,
        vocab: Tensor | None = None,
    ):
        self.view, self.bottleneck, self.restricted, self.vocab = view, bottleneck, restricted, vocab

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of the tail's, frozen or not."""
        return [p for tree in self.modules().values() for p in tree.parameters()]

    def restrict(self, targets: Tensor) -> Tensor:
        """Chooses the tokens to compute for a batch's targets `(tokens,)`; returns the targets as their indices."""
        if self.restricted is None:
            return targets
        assert self.vocab is not None
        rows = torch.cat([self.vocab.to(targets.device), targets]).unique()
        self.restricted.rows = rows
        return torch.searchsorted(rows, targets)

    def __call__(self, states: Tensor) -> Tensor:
        """Logits `(tokens, vocab)` of hidden states `(tokens, hidden)`; each is a sequence of one position."""
        if self.bottleneck is not None:
            return self.bottleneck(states)
        assert self.view is not None
        # The received states replace whatever the embeddings make of these ids; only their shape matters.
        ids = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
        self.view.ports.received = states.unsqueeze(1)
        module = self.view.module
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), **no_router_logits(module)).logits
        self.view.ports.clear()
        return logits[:, 0]

    def modules(self) -> dict[str, nn.Module]:
        """The module trees that belong to this tail."""
        trees = {"tail": self.view.module if self.view is not None else None, "bottleneck": self.bottleneck}
        return {name: tree for name, tree in trees.items() if tree is not None}


def readout_vocabulary(config: ZeroLockConfig, dataset: Any, collate: Callable[[list[Any]], dict[str, Any]]) -> Tensor:
    """The token ids of a readout of kind `"vocab"`: the given ones, or the most frequent labels of the training data.

    Raises:
        ValueError: the data set has no length, so its tokens cannot be counted beforehand.
    """
    if isinstance(config.readout_vocab, list):
        return torch.tensor(sorted(config.readout_vocab), dtype=torch.long)
    try:
        size = len(dataset)
    except TypeError as error:
        raise ValueError(
            f"readout_vocab={config.readout_vocab!r} counts tokens in the training data, which this data set cannot "
            "tell in advance: give a list of token ids."
        ) from error
    counts: Counter[int] = Counter()
    with torch.random.fork_rng():
        for start in range(0, size, 64):
            labels = collate([dataset[i] for i in range(start, min(start + 64, size))])["labels"]
            counts.update(labels[labels >= 0].tolist())
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[: config.readout_vocab or DEFAULT_VOCAB]), dtype=torch.long)


def readout_blocks(blocks: BlockMap, config: ZeroLockConfig, chunk: range) -> dict[int, nn.Module]:
    """Copies of later blocks for a readout of kind `"blocks"`: frozen weights shared, a LoRA as the config says."""
    reach = config.reach(len(blocks) - chunk.stop)
    chosen = sample_later_blocks(len(blocks), chunk.stop, reach, config.resolved_blocks_from)
    copies = {index: blocks.readout_block(index, config.readout_weights) for index in chosen}
    if config.readout_dim is not None and config.readout_dim != config.r:
        rank = config.readout_dim
        alpha = config.lora_alpha * rank / config.r
        own: Any = dataclasses.replace(config, r=rank, init_lora_weights=True)
        own.lora_alpha = alpha
        for copied in copies.values():
            for layer in copied.modules():
                if isinstance(layer, LoraLayer):
                    for name in list(layer.active_adapters):
                        layer.update_layer(name, r=rank, lora_alpha=own.lora_alpha, config=own)
            for parameter in copied.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    return copies


def make_tail(
    blocks: BlockMap, config: ZeroLockConfig, is_last: bool, tail_parameters: list[nn.Parameter], vocab: Tensor | None
) -> Tail:
    """The tail of a causal LM that one chunk reads through.

    The last chunk's is the model's own. The others' is frozen: where the tail has trainable parameters, they are
    copies as they are now (or, with `readout_weights="current"`, at any time), so that no gradient of a lower chunk
    reaches the last chunk.
    """
    none = range(0)
    if is_last:
        return Tail(blocks.view(none))
    head = base_model_of(blocks.model).get_output_embeddings()
    if config.resolved_readout == "bottleneck":
        width, hidden = _base_layer(head).weight.shape[1], base_model_of(blocks.model).config.hidden_size
        if width != hidden:
            raise ValueError(
                f"readout='bottleneck' needs a head that reads the blocks' hidden states, but the head reads {width} "
                f"features and the blocks have {hidden}: use 'blocks', 'adapter' or 'lm_head'."
            )
        return Tail(None, bottleneck=BottleneckHead(head, config.readout_dim or DEFAULT_DIM))
    trainable = [p for p in tail_parameters if p.requires_grad]
    if config.readout_weights == "current":
        return Tail(blocks.view(none, current=trainable))
    if config.resolved_readout == "vocab":
        size = _base_layer(head).weight.shape[0]
        if vocab is None or len(vocab) == 0 or int(vocab.max()) >= size:
            raise ValueError(f"readout_vocab={config.readout_vocab!r}: give token ids from 0 to {size - 1}.")
        restricted = RestrictedHead(head)
        return Tail(blocks.view(none, fresh=trainable, replace={head: restricted}), restricted=restricted, vocab=vocab)
    view = blocks.view(none, fresh=trainable)
    shared = {id(p) for p in blocks.model.parameters()}
    for parameter in view.module.parameters():
        if id(parameter) not in shared:
            parameter.requires_grad_(False)
    return Tail(view)
