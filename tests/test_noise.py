"""A stage's own dropout: right in distribution, the same on every way to the same micro-batch, another elsewhere."""

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import largest_difference, make_trainer, window_gradients
from zoo import collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.noise import StageDropout, StageNoise, draws_elsewhere, own_dropout
from peft_zerolock.runtime import SequentialRuntime
from peft_zerolock.stage import Entry
from peft_zerolock.staging import build_stages

ONES = torch.ones(200, 50)


def _dropout(p=0.3, draw="a", name="m"):
    noise = StageNoise()
    noise.begin(draw)
    return StageDropout(p, noise, name)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_a_share_of_p_is_zero_and_the_mean_is_kept(p):
    dropped = _dropout(p)(ONES)
    assert abs((dropped == 0).float().mean().item() - p) < 0.01
    kept = dropped[dropped != 0]
    assert torch.equal(kept, torch.full_like(kept, 1 / (1 - p) if p < 1 else 0))


def test_evaluation_and_p_0_leave_everything():
    assert torch.equal(_dropout().eval()(ONES), ONES)
    assert torch.equal(_dropout(0.0)(ONES), ONES)


def test_the_mask_depends_on_the_draw_the_module_and_the_call():
    first = _dropout()(ONES)
    assert torch.equal(_dropout()(ONES), first)
    assert not torch.equal(_dropout(draw="b")(ONES), first)
    assert not torch.equal(_dropout(name="n")(ONES), first)
    module = _dropout()
    assert torch.equal(module(ONES), first)
    assert not torch.equal(module(ONES), first)
    module.noise.begin("a")
    assert torch.equal(module(ONES), first)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    _dropout()(ONES)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_mask_again(reentrant):
    module = _dropout()
    drawn = []

    def block(x):
        dropped = module(module(x) + 1)
        drawn.append(dropped.detach())
        return dropped**2

    x = ONES.clone().requires_grad_()
    module(ONES)
    module.noise.begin("a")
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_another_draws_the_same_masks_again(reentrant):
    module = _dropout()
    drawn = []

    def block(x):
        dropped = module(x)
        drawn.append(dropped.detach())
        return dropped**2

    def outer(x):
        return checkpoint(block, x, use_reentrant=reentrant) * 2

    checkpoint(outer, ONES.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert len(drawn) >= 2
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])


def test_each_nn_dropout_is_replaced_once_and_keeps_its_mode():
    shared = nn.Dropout(0.2)
    tree = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(2, 2)), "b": shared, "c": nn.Dropout(0.1).eval()})
    own_dropout({"view": tree}, StageNoise())
    assert isinstance(tree["b"], StageDropout)
    assert tree["a"][0] is tree["b"]
    assert tree["b"].name != tree["c"].name
    assert (tree["b"].p, tree["c"].p) == (0.2, 0.1)
    assert (tree["b"].training, tree["c"].training) == (True, False)


def _stages(num_chunks=2, name="llama", **model):
    config = ZeroLockConfig(**lora_arguments(name, lora_dropout=0.5), num_chunks=num_chunks)
    model = get_peft_model(make_model(name, **model), config)
    return model, build_stages(model, config, sliced=True)


def _gradients(stages, draw):
    batch = collate(token_rows(4).rows)
    entry = Entry(batch, (batch["labels"] != -100).sum(), draw=draw)
    for stage in stages:
        for parameter in (*stage.adapters.values(), *stage.readout.values()):
            parameter.grad = None
    SequentialRuntime(stages, torch.Tensor.backward).submit(entry, None)
    return [p.grad.clone() for s in stages for n, p in s.adapters.items() if "lora_B" in n]


def test_a_micro_batch_draws_the_same_whatever_came_before():
    _, stages = _stages()
    first = _gradients(stages, "1")
    other = _gradients(stages, "2")
    again = _gradients(stages, "1")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_one_chunk_keeps_pytorch_s_dropout():
    _, stages = _stages(num_chunks=1)
    assert not any(isinstance(m, StageDropout) for m in stages[0].view.module.modules())


def test_the_user_s_model_keeps_its_modules():
    model, stages = _stages()
    assert any(type(m) is nn.Dropout for m in model.modules())
    assert not any(isinstance(m, StageDropout) for m in model.modules())
    assert all(any(isinstance(m, StageDropout) for m in s.view.module.modules()) for s in stages)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_with_lora_dropout_are_the_same_with_checkpointing(tmp_path, reentrant):
    settings = {"chunks": {"num_chunks": 2}, "lora": {"lora_dropout": 0.4}}
    kwargs = {"use_reentrant": reentrant}
    plain = window_gradients(make_trainer(tmp_path, **settings))
    checkpointed = make_trainer(
        tmp_path, **settings, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs
    )
    assert largest_difference(plain, window_gradients(checkpointed)) <= 1e-7


def test_stages_that_draw_elsewhere_are_found():
    model, stages = _stages()
    assert draws_elsewhere(stages, model) == []
    model, stages = _stages(attention_dropout=0.3)
    before = torch.get_rng_state()
    assert draws_elsewhere(stages, model) == ["chunk_1", "chunk_2"]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(stage.view.ports.received is None for stage in stages)
