"""Every LoraConfig option keeps working under local updates: what it names moves, nothing else does."""

import math
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from small_runs import changed, losses, make_trainer, snapshot

QV = ["self_attn.q_proj", "self_attn.v_proj"]
LINEAR = [*QV, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def lora_keys(modules: list[str], blocks: list[int], *extra: str) -> set[str]:
    """State dict names of the adapters on `modules` of `blocks`; lora_A, lora_B and what `extra` adds."""
    kinds = ["lora_A.default.weight", "lora_B.default.weight", *extra]
    return {
        f"base_model.model.model.layers.{i}.{module}.{kind}" for i in blocks for module in modules for kind in kinds
    }


HEAD = {f"base_model.model.lm_head.{kind}.default.weight" for kind in ("lora_A", "lora_B")}
EMBEDDING = {f"base_model.model.model.embed_tokens.lora_embedding_{side}.default" for side in "AB"}
TOKENS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default"
ALL = [0, 1, 2]

OPTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, lora_keys(QV, ALL)),
    "rslora": ({"use_rslora": True}, lora_keys(QV, ALL)),
    "dora": ({"use_dora": True}, lora_keys(QV, ALL, "lora_magnitude_vector.default.weight")),
    "pissa": ({"init_lora_weights": "pissa"}, lora_keys(QV, ALL)),
    "pissa, readout lm_head": ({"init_lora_weights": "pissa", "readout": "lm_head"}, lora_keys(QV, ALL)),
    "pissa, readout blocks": ({"init_lora_weights": "pissa", "readout": "blocks"}, lora_keys(QV, ALL)),
    "orthogonal, readout blocks of rank 3": (
        {"init_lora_weights": "orthogonal", "readout": "blocks", "readout_dim": 3},
        lora_keys(QV, ALL),
    ),
    "dora, readout blocks of rank 2": (
        {"use_dora": True, "readout": "blocks", "readout_dim": 2},
        lora_keys(QV, ALL, "lora_magnitude_vector.default.weight"),
    ),
    "gaussian": ({"init_lora_weights": "gaussian"}, lora_keys(QV, ALL)),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, lora_keys(QV, ALL)),
    "all-linear": ({"target_modules": "all-linear"}, lora_keys(LINEAR, ALL)),
    "regular expression": ({"target_modules": r".*layers\.[01]\.mlp\..*_proj"}, lora_keys(LINEAR[4:], [0, 1])),
    "only the first block": ({"layers_to_transform": [0]}, lora_keys(QV, [0])),
    "only the last block": ({"layers_to_transform": [2]}, lora_keys(QV, [2])),
    "exclude_modules": ({"exclude_modules": ["v_proj"]}, lora_keys(QV[:1], ALL)),
    "lm_head saved": (
        {"modules_to_save": ["lm_head"]},
        lora_keys(QV, ALL) | {"base_model.model.lm_head.modules_to_save.default.weight"},
    ),
    "lm_head saved, readout blocks": (
        {"modules_to_save": ["lm_head"], "readout": "blocks"},
        lora_keys(QV, ALL) | {"base_model.model.lm_head.modules_to_save.default.weight"},
    ),
    "lora_bias": ({"lora_bias": True}, lora_keys(QV, ALL, "lora_B.default.bias")),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 1}}, lora_keys(QV, ALL)),
    "rank_pattern, readout blocks of rank 3": (
        {"rank_pattern": {"q_proj": 2}, "readout": "blocks", "readout_dim": 3},
        lora_keys(QV, ALL),
    ),
    "lm_head as target": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, lora_keys(QV, ALL) | HEAD),
    "embeddings as target": (
        {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        lora_keys(QV, ALL) | EMBEDDING,
    ),
    "both ends as targets": (
        {"target_modules": ["q_proj", "v_proj", "lm_head", "embed_tokens"]},
        lora_keys(QV, ALL) | EMBEDDING | HEAD,
    ),
    "trainable tokens": ({"trainable_token_indices": [3, 4, 5]}, lora_keys(QV, ALL) | {TOKENS}),
    "lora_dropout": ({"lora_dropout": 0.5}, lora_keys(QV, ALL)),
    "bias lora_only": ({"bias": "none", "target_modules": ["q_proj"]}, lora_keys(QV[:1], ALL)),
    "unsliced": ({"logits_slice": None}, lora_keys(QV, ALL)),
    "unsliced, lm_head saved": (
        {"logits_slice": None, "modules_to_save": ["lm_head"]},
        lora_keys(QV, ALL) | {"base_model.model.lm_head.modules_to_save.default.weight"},
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_the_option_names_moves_and_nothing_else(tmp_path, option):
    config, expected = OPTIONS[option]
    trainer = make_trainer(tmp_path, config=config)
    before = snapshot(trainer.model)
    trainer.train()
    assert changed(trainer.model, before) == expected
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained == {name for name in expected if not name.startswith("buffer")}
    logged = losses(trainer)
    assert len(logged) == 3
    assert all(math.isfinite(value) for entry in logged for value in entry.values())


def layer_of(trainer, block: int, name: str) -> LoraLayer:
    return trainer.model.get_submodule(f"base_model.model.model.layers.{block}.self_attn.{name}")


def test_scalings_and_ranks_follow_the_options(tmp_path):
    trainer = make_trainer(tmp_path, config={"use_rslora": True, "rank_pattern": {"q_proj": 2}})
    assert layer_of(trainer, 0, "q_proj").scaling["default"] == pytest.approx(8 / math.sqrt(2))
    assert layer_of(trainer, 0, "v_proj").scaling["default"] == pytest.approx(8 / math.sqrt(4))
    assert layer_of(trainer, 2, "q_proj").lora_A["default"].weight.shape == (2, 16)


@pytest.mark.parametrize("readout", ["lm_head", "blocks"])
def test_pissa_starts_at_the_models_own_function(tmp_path, readout):
    plain = make_trainer(tmp_path / "plain", config={"readout": readout})
    pissa = make_trainer(tmp_path / "pissa", config={"readout": readout, "init_lora_weights": "pissa"})
    for trainer in (plain, pissa):
        trainer.train()
    first, second = losses(plain)[0], losses(pissa)[0]
    assert first.keys() == second.keys() >= {"loss/chunk_1", "loss/chunk_2"}
    for key in ("loss/chunk_1", "loss/chunk_2"):
        assert first[key] == pytest.approx(second[key], abs=1e-5)


@pytest.mark.parametrize(
    ("block", "learning", "still"), [(0, "chunk_1", "chunk_2"), (2, "chunk_2", "chunk_1")], ids=["first", "last"]
)
def test_a_chunk_without_adapters_has_neither_graph_nor_readout(tmp_path, block, learning, still):
    trainer = make_trainer(tmp_path, config={"layers_to_transform": [block], "readout_rows": 1.0})
    trainer.create_optimizer()  # makes the stages that are trained
    stages = {stage.name: stage for stage in trainer.stages}
    assert len(stages[learning].adapters) == 4
    assert (stages[still].adapters, stages[still].readout) == ({}, {})
    assert stages[still].learns is False
    entered = []
    for stage in stages.values():
        block_in_view = stage.view.module.get_submodule(f"base_model.model.model.layers.{stage.chunk[-1]}.block")
        block_in_view.register_forward_hook(lambda _, __, out, name=stage.name: entered.append((name, out.grad_fn)))
    trainer.train()
    graphs = {name: {fn is not None for n, fn in entered if n == name} for name in stages}
    assert graphs == {learning: {True}, still: {False}}
    logged = {key for entry in losses(trainer) for key in entry}
    assert "loss/chunk_2" in logged  # the last chunk's task term is the run's loss, learning or not
    assert ("loss/chunk_1" in logged) == (learning == "chunk_1")


def test_train_chunks_leaves_the_other_chunk_alone(tmp_path):
    trainer = make_trainer(tmp_path, config={"train_chunks": [-1]})
    before = snapshot(trainer.model)
    trainer.train()
    # Two chunks of three blocks: the first has two of them.
    assert changed(trainer.model, before) == lora_keys(QV, list(trainer.stages[1].chunk))
    assert list(trainer.stages[1].chunk) == [2]


def test_trainable_tokens_belong_to_chunk_1(tmp_path):
    trainer = make_trainer(tmp_path, config={"trainable_token_indices": [3, 4, 5]})
    assert TOKENS in trainer.stages[0].adapters
    assert not any("token" in name for name in trainer.stages[1].adapters)


@pytest.mark.parametrize(
    "config",
    [
        {"trainable_token_indices": [3, 4]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"trainable_token_indices": {"lm_head": [3, 4], "embed_tokens": [3, 4]}},
    ],
    ids=["tokens", "saved and tied", "tokens at both ends"],
)
def test_training_both_ends_of_tied_embeddings_is_refused(tmp_path, config):
    with pytest.raises(ValueError, match=r"by chunk 1 and by chunk 2.*trainable_token_indices"):
        make_trainer(tmp_path, config=config, model={"tie_word_embeddings": True})


def test_readouts_of_rank_2_leave_the_models_ranks_alone(tmp_path):
    trainer = make_trainer(tmp_path, config={"readout": "blocks", "readout_dim": 2})
    ranks = {p.shape[0] for name, p in trainer.stages[0].readout.items() if "lora_A" in name}
    assert ranks == {2}
    assert layer_of(trainer, 2, "q_proj").lora_A["default"].weight.shape == (4, 16)
    assert trainer.zerolock_config.r == 4
    ids = {id(p) for p in trainer.model.parameters()}
    assert not any(id(p) in ids for p in trainer.stages[0].readout.values())


def test_dropout_is_drawn_in_training_only(tmp_path):
    trainer = make_trainer(tmp_path, config={"lora_dropout": 0.5, "init_lora_weights": False})
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    trainer.model.eval()
    batch = trainer.data_collator([trainer.train_dataset[0]])
    with torch.no_grad():
        assert torch.equal(trainer.model(**batch).logits, trainer.model(**batch).logits)
