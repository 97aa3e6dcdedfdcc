"""The range checks of ZeroLockConfig: each error names the value, the range and the remedy."""

import math

import pytest

from peft_zerolock import ZeroLockConfig

REFUSED = [
    ({"num_chunks": 0}, "num_chunks=0", ">= 1"),
    ({"num_chunks": -2}, "num_chunks=-2", ">= 1"),
    ({"num_chunks": 2.0}, "num_chunks=2.0", "whole number"),
    ({"num_chunks": True}, "num_chunks=True", "whole number"),
    ({"num_chunks": "2"}, "num_chunks='2'", "whole number"),
    ({"chunk_sizes": []}, "chunk_sizes=[]", "positive whole numbers"),
    ({"chunk_sizes": [2, 0]}, "chunk_sizes=[2, 0]", "at least one block"),
    ({"chunk_sizes": [2, 1.5]}, "chunk_sizes=[2, 1.5]", "positive whole numbers"),
    ({"chunk_sizes": 3}, "chunk_sizes=3", "positive whole numbers"),
    ({"chunk_sizes": "21"}, "chunk_sizes='21'", "positive whole numbers"),
    ({"num_chunks": 3, "chunk_sizes": [2, 1]}, "num_chunks=3", "give one of them"),
    ({"train_chunks": []}, "train_chunks=[]", "1 to 2"),
    ({"train_chunks": [0]}, "train_chunks=[0]", "1 to 2"),
    ({"train_chunks": [3]}, "train_chunks=[3]", "-1 to -2"),
    ({"train_chunks": [-3]}, "train_chunks=[-3]", "-1 to -2"),
    ({"train_chunks": 2}, "train_chunks=2", "1 to 2"),
    ({"train_chunks": [4], "chunk_sizes": [1, 1, 1]}, "train_chunks=[4]", "1 to 3"),
    ({"alpha": 0}, "alpha=0", "in (0, 1]"),
    ({"alpha": 1.01}, "alpha=1.01", "in (0, 1]"),
    ({"alpha": -0.5}, "alpha=-0.5", "in (0, 1]"),
    ({"alpha": math.nan}, "alpha=nan", "in (0, 1]"),
    ({"alpha": "0.5"}, "alpha='0.5'", "in (0, 1]"),
    ({"alpha": True}, "alpha=True", "in (0, 1]"),
    ({"consistency": "both"}, "consistency='both'", "'forward' or 'reverse'"),
    ({"consistency_first": "no"}, "consistency_first='no'", "True or False"),
    ({"readout": "head"}, "readout='head'", "'bottleneck'"),
    ({"readout": None}, "readout=None", "'blocks'"),
    ({"readout_dim": 0}, "readout_dim=0", ">= 1"),
    ({"readout_dim": 1.5}, "readout_dim=1.5", "whole number"),
    ({"readout_blocks": -1}, "readout_blocks=-1", ">= 0"),
    ({"readout_blocks": 1.5}, "readout_blocks=1.5", "in (0, 1)"),
    ({"readout_blocks": True}, "readout_blocks=True", "'all'"),
    ({"readout_blocks": "most"}, "readout_blocks='most'", "'all'"),
    ({"readout_blocks": None}, "readout_blocks=None", "whole number"),
    ({"readout_weights": "shared"}, "readout_weights='shared'", "'own' or 'current'"),
    ({"readout_weights": "current", "readout": "lm_head"}, "readout_weights='current'", "leave it at 'own'"),
    ({"readout_weights": "current", "readout_dim": 2}, "readout_dim=2", "use readout_weights='own'"),
    ({"readout_weights": "current", "readout_warmup_ratio": 0.1}, "readout_warmup_ratio=0.1", "warm up"),
    ({"readout_blocks": 0, "readout_warmup_ratio": 0.1}, "readout_warmup_ratio=0.1", "at least one block"),
    ({"readout_rows": 0}, "readout_rows=0", "in (0, 1]"),
    ({"readout_rows": 1.2}, "readout_rows=1.2", "in (0, 1]"),
    ({"readout_rows": "half"}, "readout_rows='half'", "'auto'"),
    ({"readout_blocks_from": "first"}, "readout_blocks_from='first'", "next or last"),
    ({"readout_vocab": 100}, "readout_vocab=100", "readout='vocab'"),
    ({"readout": "vocab", "readout_vocab": 0}, "readout_vocab=0", ">= 1"),
    ({"readout": "vocab", "readout_vocab": []}, "readout_vocab=[]", "token ids"),
    ({"readout": "vocab", "readout_vocab": [3, -1]}, "readout_vocab=[3, -1]", "token ids >= 0"),
    ({"readout": "vocab", "readout_vocab": 0.5}, "readout_vocab=0.5", ">= 1"),
    ({"readout_learning_rate": 0}, "readout_learning_rate=0", "greater than 0"),
    ({"readout_learning_rate": -1e-3}, "readout_learning_rate=-0.001", "greater than 0"),
    ({"readout_learning_rate": math.inf}, "readout_learning_rate=inf", "greater than 0"),
    ({"readout_learning_rate": "1e-3"}, "readout_learning_rate='1e-3'", "greater than 0"),
    ({"readout_warmup_ratio": 1, "readout": "blocks"}, "readout_warmup_ratio=1", "in [0, 1)"),
    ({"readout_warmup_ratio": -0.1, "readout": "blocks"}, "readout_warmup_ratio=-0.1", "in [0, 1)"),
    ({"readout_warmup_ratio": 0.1, "readout": "lm_head"}, "readout_warmup_ratio=0.1", "to warm up"),
    ({"readout_warmup_ratio": 0.2, "readout": "lm_head"}, "readout_warmup_ratio=0.2", "or a ratio of 0"),
    (
        {"init_lora_weights": "pissa_niter_4", "readout": "blocks", "readout_dim": 2},
        "readout_dim=2",
        "Use readout_dim=8 or None",
    ),
    ({"logits_slice": 0}, "logits_slice=0", ">= 1"),
    ({"logits_slice": 2.5}, "logits_slice=2.5", "whole number"),
    ({"logits_slice": None, "readout": "vocab"}, "logits_slice=None", "give a number"),
    ({"logits_slice": None, "readout": "bottleneck"}, "logits_slice=None", "give a number"),
    ({"objective": "both"}, "objective='both'", "'task' or 'reconstruction'"),
    ({"objective": "reconstruction", "readout": "adapter"}, "readout='adapter'", "use objective='task'"),
    ({"control": 1}, "control=1", "True or False"),
    ({"control": True, "num_chunks": 1}, "1 chunk(s)", "leave control out"),
    ({"control": True, "train_chunks": [-1]}, "those that learn are [2]", "at least one below it"),
    ({"control": True, "num_chunks": 3, "train_chunks": [1, 2]}, "those that learn are [1, 2]", "train the last one"),
    ({"task_type": "SEQ_CLS", "readout": "vocab"}, "readout='vocab'", "'adapter' or 'blocks'"),
    ({"task_type": "TOKEN_CLS", "readout": "bottleneck"}, "readout='bottleneck'", "'adapter' or 'blocks'"),
]


@pytest.mark.parametrize(("given", "named", "remedy"), REFUSED, ids=[str(given) for given, _, _ in REFUSED])
def test_a_value_out_of_range_is_named_with_its_range(given, named, remedy):
    with pytest.raises(ValueError) as raised:
        ZeroLockConfig(**({"task_type": "CAUSAL_LM"} | given))
    assert named in str(raised.value)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {"num_chunks": 1, "alpha": 1},
        {"num_chunks": 2, "chunk_sizes": [2, 1]},
        {"alpha": 1e-6, "readout_learning_rate": 1e-9, "logits_slice": 1},
        {"readout": "vocab", "readout_vocab": [0, 5]},
        {"readout_warmup_ratio": 0.1},
        {"readout_warmup_ratio": 0.99, "readout": "adapter"},
        {"readout_warmup_ratio": 0.1, "task_type": "SEQ_CLS", "readout": "lm_head"},
        {"train_chunks": [1, -1]},
        {"control": True, "num_chunks": 3, "train_chunks": [1, 3]},
        {"objective": "reconstruction", "readout_warmup_ratio": 0.1, "alpha": 0.5, "readout_dim": 3},
        {"logits_slice": None},
    ],
    ids=str,
)
def test_values_at_the_edge_of_their_range_are_taken(given):
    config = ZeroLockConfig(**({"task_type": "CAUSAL_LM"} | given))
    assert {name: getattr(config, name) for name in given} == given


def test_the_checks_of_loraconfig_still_run():
    with pytest.raises(ValueError, match="Invalid task type"):
        ZeroLockConfig(task_type="NOTHING")
    with pytest.raises(ValueError, match="layers_pattern"):
        ZeroLockConfig(target_modules=["q_proj"], layers_pattern=["layers"])


def test_resolved_settings():
    assert ZeroLockConfig().resolved_num_chunks == 2
    assert ZeroLockConfig(chunk_sizes=[1, 1, 1]).resolved_num_chunks == 3
    assert ZeroLockConfig(num_chunks=4, train_chunks=[1, -1]).trained_chunks == {0, 3}
    assert ZeroLockConfig(num_chunks=3).trained_chunks == {0, 1, 2}
    assert ZeroLockConfig(task_type="CAUSAL_LM").resolved_readout == "blocks"
    assert ZeroLockConfig(task_type="CAUSAL_LM").resolved_blocks_from == "last"
    assert ZeroLockConfig(task_type="SEQ_CLS").resolved_blocks_from == "even"
    assert ZeroLockConfig(task_type="SEQ_CLS", readout_blocks_from="next").resolved_blocks_from == "next"
    assert ZeroLockConfig(task_type="SEQ_CLS").resolved_readout == "blocks"
    assert ZeroLockConfig(task_type="SEQ_CLS", readout="lm_head").resolved_readout == "lm_head"
