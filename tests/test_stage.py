"""Stages are views of the model: run one after the other they are the model, and no gradient crosses a boundary."""

import pytest
import torch
from peft import get_peft_model
from zoo import DECODERS, ENCODERS, collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.admission import output_of
from peft_zerolock.blocks import BlockMap, find_blocks
from peft_zerolock.staging import build_stages, dissect

CASES = [
    *[(name, "CAUSAL_LM") for name in DECODERS],
    *[(name, "SEQ_CLS") for name in [*DECODERS, *ENCODERS]],
    *[(name, "TOKEN_CLS") for name in ["llama", "qwen2", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", *ENCODERS]],
    *[(name, "BARE") for name in ["llama", "gpt2", "opt", "bert", "deberta"]],
]


def _wrapped(name, task, **config):
    model = get_peft_model(make_model(name, task), ZeroLockConfig(**lora_arguments(name, task), **config))
    torch.manual_seed(3)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def _batch(task="CAUSAL_LM"):
    batch = collate(token_rows(3).rows)
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def _gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _cut_by_detach(model, starts, batch):
    """One forward pass of the whole model, cut by detach before the blocks in `starts`: h_1 .. h_K-1, output."""
    left, hooks = [], []

    def cut(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        left.append(hidden)
        if args:
            return (hidden.detach(), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden.detach()}

    for start in starts:
        hooks.append(find_blocks(model)[start].register_forward_pre_hook(cut, with_kwargs=True))
    output = output_of(model(**batch))
    for hook in hooks:
        hook.remove()
    return left, output


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize(("name", "task"), CASES, ids=lambda value: value)
def test_stages_are_the_model_cut_by_detach(name, task, num_chunks):
    model = _wrapped(name, task, num_chunks=num_chunks)
    batch = _batch()
    _, chunks, _ = dissect(model, model.peft_config["default"])
    blocks = BlockMap.of(model, batch)
    received, left = None, []
    for chunk in chunks:
        view = blocks.view(chunk)
        view.module.eval()
        view.ports.received = received
        output = output_of(view.module(**batch))
        left.append(view.ports.left)
        received = view.ports.left.detach()
    with torch.no_grad():
        assert torch.equal(output, output_of(model(**batch)))
    torch.manual_seed(5)
    weights = [torch.randn_like(h) for h in left[:-1]] + [torch.randn_like(output)]
    sum((h * w).sum() for h, w in zip([*left[:-1], output], weights, strict=True)).backward()
    ours = _gradients(model)
    cut, whole = _cut_by_detach(model, [chunk.start for chunk in chunks[1:]], batch)
    sum((h * w).sum() for h, w in zip([*cut, whole], weights, strict=True)).backward()
    expected = _gradients(model)
    assert ours.keys() == expected.keys()
    assert max((ours[n] - expected[n]).abs().max().item() for n in ours) == 0.0


@pytest.mark.parametrize(("name", "task"), CASES, ids=lambda value: value)
def test_one_chunk_is_the_stock_forward(name, task):
    model = _wrapped(name, task, num_chunks=1)
    batch = _batch()
    view = BlockMap.of(model, batch).view(range(0, 3))
    view.module.eval()
    with torch.no_grad():
        assert torch.equal(output_of(view.module(**batch)), output_of(model(**batch)))


@pytest.mark.parametrize("name", DECODERS)
def test_the_tail_reads_the_last_hidden_state_as_the_model_does(name):
    model = _wrapped(name, "CAUSAL_LM", num_chunks=2)
    stages = build_stages(model, model.peft_config["default"], sliced=True)
    batch, received = _batch(), None
    with torch.no_grad():
        for stage in stages:
            stage.view.module.eval()
            stage.view.ports.received = received
            stage.view.module(**batch)
            received = stage.view.ports.left
        logits = stages[-1].tail(stages[-1].view.ports.read.flatten(0, 1)).unflatten(0, batch["input_ids"].shape)
        assert torch.allclose(logits, model(**batch).logits, atol=1e-6)


def test_views_share_every_weight_and_make_no_copies():
    model = _wrapped("llama", "CAUSAL_LM", num_chunks=3, readout="lm_head")
    known = {id(p) for p in model.parameters()}
    for stage in build_stages(model, model.peft_config["default"], sliced=True):
        for tree in (stage.view.module, *stage.tail.modules().values()):
            assert {id(p) for p in tree.parameters()} <= known


def test_each_trainable_parameter_belongs_to_exactly_one_chunk():
    model = make_model("llama", tie_word_embeddings=False)
    arguments = lora_arguments("llama", target_modules=["q_proj", "embed_tokens", "lm_head"])
    model = get_peft_model(model, ZeroLockConfig(**arguments, num_chunks=3))
    stages = build_stages(model, model.peft_config["default"], sliced=True)
    names = [name for stage in stages for name in stage.adapters]
    assert sorted(names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert len(names) == len(set(names))
    assert any("embed_tokens" in name for name in stages[0].adapters)
    assert any("lm_head" in name for name in stages[2].adapters)


@pytest.mark.parametrize("kind", ["next", "even", "last"])
def test_readout_blocks_share_frozen_weights_and_have_a_lora_of_their_own(kind):
    config = ZeroLockConfig(
        **lora_arguments("bert", "SEQ_CLS"),
        chunk_sizes=[1, 2],
        readout="blocks",
        readout_blocks=1,
        readout_blocks_from=kind,
        readout_dim=2,
    )
    model = get_peft_model(make_model("bert", "SEQ_CLS"), config)
    first = build_stages(model, config, sliced=False)[0]
    block = 1 if kind == "next" else 2
    lora = {n: tuple(p.shape) for n, p in first.readout.items() if "lora" in n}
    prefix = f"view.base_model.model.bert.encoder.layer.{block}.block.attention.self"
    assert lora == {
        f"{prefix}.query.lora_A.default.weight": (2, 16),
        f"{prefix}.query.lora_B.default.weight": (16, 2),
        f"{prefix}.value.lora_A.default.weight": (2, 16),
        f"{prefix}.value.lora_B.default.weight": (16, 2),
    }
    known = {id(p) for p in model.parameters()}
    assert not known & {id(p) for p in first.readout.values()}
    frozen = [p for p in first.view.module.parameters() if not p.requires_grad]
    assert {id(p) for p in frozen} <= known


def test_all_the_rest_as_readout_at_the_start_gives_backpropagation_s_gradient():
    """With lora_B = 0 everywhere, the later blocks' own LoRA is theirs: chunk 1's gradient is that of the whole."""
    config = ZeroLockConfig(**lora_arguments("llama"), chunk_sizes=[1, 2], readout_rows=1.0)
    model = get_peft_model(make_model("llama"), config)
    batch = collate(token_rows(4).rows)
    stages = build_stages(model, config, sliced=True)
    from peft_zerolock.stage import Entry

    count = (batch["labels"][:, 1:] != -100).sum()
    stages[0].step(Entry(batch, count), None, None).objective.backward()
    ours = {n: stages[0].adapters[n].grad.clone() for n in stages[0].adapters}
    model.zero_grad()
    model(**batch, num_items_in_batch=count).loss.backward()
    assert ours
    for name, gradient in ours.items():
        assert (gradient - model.get_parameter(name).grad).abs().max() < 1e-6
