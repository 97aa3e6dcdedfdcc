"""The byte counter: models whose bytes are known by hand, torch's MemTracker, and fake against real tensors."""

import pytest
import torch
from counting import (
    ACTIVATIONS,
    ADAPTERS,
    BASE,
    BOUNDARY,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    READOUTS,
    TEMPORARIES,
    MemoryCounter,
)
from shapes import ShapesOnly
from steps import Setup
from torch import nn
from torch.distributed._tools import MemTracker
from zoo import class_rows, collate, lora_arguments, make_model, token_rows

FLOAT = 4


def _two_layers():
    """32 -> 64 (trained), ReLU, 64 -> 16 (frozen)."""
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))
    model[2].requires_grad_(False)
    return model


def test_each_category_of_a_step_is_what_it_is_by_hand():
    model, batch = _two_layers(), torch.randn(8, 32)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    counter = MemoryCounter(vocab=16)
    counter.add_parameters([model[2].weight], BASE)
    counter.add_parameters([model[0].weight], ADAPTERS)
    with counter:
        output = model(batch)
        # ReLU holds its own output, made in the forward pass; the input of the first layer was made outside.
        assert counter.held[ACTIVATIONS] == 8 * 64 * FLOAT
        assert counter.held[LOGITS] == 8 * 16 * FLOAT
        output.sum().backward()
        assert counter.held[GRADIENTS] == 64 * 32 * FLOAT
        del output
        optimizer.step()
        counter.mark([state["momentum_buffer"] for state in optimizer.state.values()], OPTIMIZER)
        optimizer.zero_grad()
    assert counter.held == {
        BASE: 64 * 16 * FLOAT,
        ADAPTERS: 32 * 64 * FLOAT,
        READOUTS: 0,
        GRADIENTS: 0,
        OPTIMIZER: 32 * 64 * FLOAT,
        ACTIVATIONS: 0,
        BOUNDARY: 0,
        LOGITS: 0,
        TEMPORARIES: 0,
    }
    assert counter.peaks[ACTIVATIONS] == counter.activation_peak == 8 * 64 * FLOAT
    assert counter.peak == sum(counter.at_peak.values())
    assert counter.total == sum(counter.held.values())


def test_a_storage_counts_once_whatever_its_views_and_however_often_it_is_held():
    with MemoryCounter() as counter:
        base = torch.randn(10, 10, requires_grad=True)
        made = base * 2
        views = [made[0], made.t(), made.view(-1)]
        product = made.t() * made + made * made
        assert counter.held[ACTIVATIONS] == 100 * FLOAT
        del product
        assert counter.held == {**dict.fromkeys(counter.held, 0), TEMPORARIES: 2 * 100 * FLOAT}
        del views, made, base
    assert counter.total == 0


def test_averages_are_over_the_moments_at_which_something_was_made():
    with MemoryCounter() as counter:
        first = torch.ones(4)
        second = torch.ones(4)
        first.add_(second)
        assert counter.averages[TEMPORARIES] == (1 + 2) * 4 * FLOAT / 2
        counter.restart()
        third = first + second
    assert counter.averages[TEMPORARIES] == counter.peak == (2 + 1) * third.nbytes


def _setup(name, task, num_chunks, checkpointing, make=lambda make: make()):
    method = {"trainer": "bp", "checkpointing": checkpointing}
    if num_chunks:
        method |= {"trainer": "zerolock", "zerolock": {"num_chunks": num_chunks, "logits_slice": 4}}
    return Setup(lambda: make_model(name, task, num_hidden_layers=4), lora_arguments(name, task), method, make)


def _batch(task):
    return collate((token_rows(4) if task == "CAUSAL_LM" else class_rows(4)).rows)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["held", "checkpointed"])
@pytest.mark.parametrize(
    "name, task, num_chunks",
    [("llama", "CAUSAL_LM", None), ("llama", "CAUSAL_LM", 2), ("bert", "SEQ_CLS", 2)],
    ids=["llama BP", "llama", "bert"],
)
def test_fake_tensors_count_as_real_ones_do(name, task, num_chunks, checkpointing):
    real = _setup(name, task, num_chunks, checkpointing).count(_batch(task))
    with ShapesOnly() as shapes:
        fake = _setup(name, task, num_chunks, checkpointing, shapes.model).count(_batch(task))
    assert (fake.peak, fake.at_peak, fake.peaks) == (real.peak, real.at_peak, real.peaks)
    assert fake.averages == real.averages
    used = {ADAPTERS, GRADIENTS, OPTIMIZER, ACTIVATIONS} | ({BOUNDARY, READOUTS} if num_chunks else set())
    assert all(real.peaks[category] > 0 for category in used)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["held", "checkpointed"])
def test_the_whole_peak_is_that_of_torch_s_own_tracker(checkpointing):
    """On a model whose every weight is trained: torch's tracker fails on frozen ones."""
    model = make_model("llama", num_hidden_layers=4)
    if checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    batch = _batch("CAUSAL_LM")
    counter = MemoryCounter()
    counter.add_parameters(model.parameters(), ADAPTERS)
    counter.mark(model.buffers(), BASE)
    with counter:
        model(**batch).loss.backward()
    model.zero_grad()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(**batch).loss.backward()
    assert tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] == counter.peak
