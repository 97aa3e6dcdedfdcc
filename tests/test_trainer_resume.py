"""A run that was stopped and resumed is the run that was not stopped: 8 steps = 4 + 4, bit for bit, dropout on."""

import json
from pathlib import Path

import pytest
import torch
import zoo
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from small_runs import changed, losses, make_arguments, make_trainer, snapshot

from peft_zerolock import ZeroLockConfig, ZeroLockTrainer, load_adapter
from peft_zerolock.checkpoint import READOUTS_NAME, load_tensors

DROPOUT = {
    "llama": {"attention_dropout": 0.2},
    "bert": {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.1, "classifier_dropout": 0.1},
}
BY_STEPS = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
# 16 rows, 2 a step: 8 steps are one epoch. With accumulation 2 an epoch has 4.
BY_EPOCHS = {
    **{"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2},
    "save_strategy": "epoch",
}


class Halt(Exception):
    """The power went off."""


def trainer_for(folder, name="llama", task="CAUSAL_LM", config=None, **arguments):
    settings = {"lora_dropout": 0.2, "alpha": 0.7} | (config or {})
    return make_trainer(folder, name, task, config=settings, model=DROPOUT[name], **arguments)


def everything(trainer: ZeroLockTrainer) -> dict[str, torch.Tensor]:
    """Model, readouts (their frozen copies too) and optimizer state, by name."""
    tensors = snapshot(trainer.model)
    for stage in trainer.stages:
        trees = {"view": stage.view.module} | ({} if stage.tail is None else stage.tail.modules())
        for prefix, tree in trees.items():
            tensors |= {f"{stage.name}.{prefix}.{name}": t.clone() for name, t in tree.state_dict().items()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    return tensors


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


RUNS = {
    "llama, by steps": ("llama", "CAUSAL_LM", {}, BY_STEPS),
    "llama, by epochs, accumulation": ("llama", "CAUSAL_LM", {}, BY_EPOCHS),
    "llama, by steps, accumulation": ("llama", "CAUSAL_LM", {}, BY_STEPS | {"gradient_accumulation_steps": 2}),
    "llama, adapter": ("llama", "CAUSAL_LM", {"readout": "adapter", "readout_learning_rate": 0.005}, BY_STEPS),
    "llama, blocks": ("llama", "CAUSAL_LM", {"readout": "blocks", "readout_blocks": 1}, BY_STEPS),
    "llama, blocks of rank 2, by epochs": (
        "llama",
        "CAUSAL_LM",
        {"readout": "blocks", "readout_dim": 2},
        BY_EPOCHS,
    ),
    "llama, bottleneck": ("llama", "CAUSAL_LM", {"readout": "bottleneck", "readout_dim": 4}, BY_STEPS),
    "llama, vocab": ("llama", "CAUSAL_LM", {"readout": "vocab", "readout_vocab": 20}, BY_STEPS),
    "llama, three chunks": ("llama", "CAUSAL_LM", {"num_chunks": 3, "readout": "adapter"}, BY_STEPS),
    "llama, trained head": ("llama", "CAUSAL_LM", {"modules_to_save": ["lm_head"]}, BY_STEPS),
    "llama, trained head, unsliced": (
        "llama",
        "CAUSAL_LM",
        {"modules_to_save": ["lm_head"], "logits_slice": None, "readout": "adapter"},
        BY_STEPS,
    ),
    "llama, head as target": ("llama", "CAUSAL_LM", {"target_modules": ["q_proj", "lm_head"]}, BY_STEPS),
    "llama, PiSSA, blocks": ("llama", "CAUSAL_LM", {"init_lora_weights": "pissa", "readout": "blocks"}, BY_STEPS),
    "llama, warm-up": ("llama", "CAUSAL_LM", {"readout": "adapter", "readout_warmup_ratio": 0.7}, BY_STEPS),
    "llama, one chunk trained": ("llama", "CAUSAL_LM", {"train_chunks": [2]}, BY_STEPS),
    "llama, reconstruction": ("llama", "CAUSAL_LM", {"num_chunks": 3, "objective": "reconstruction"}, BY_STEPS),
    "llama, control": ("llama", "CAUSAL_LM", {"num_chunks": 3, "control": True}, BY_STEPS),
    "bert, control, accumulation": (
        "bert",
        "SEQ_CLS",
        {"control": True},
        BY_STEPS | {"gradient_accumulation_steps": 2},
    ),
    "bert, by steps": ("bert", "SEQ_CLS", {}, BY_STEPS),
    "bert, by epochs, accumulation": ("bert", "SEQ_CLS", {}, BY_EPOCHS),
    "bert, lm_head": ("bert", "SEQ_CLS", {"readout": "lm_head"}, BY_STEPS),
    "bert, adapter, by epochs": ("bert", "SEQ_CLS", {"readout": "adapter"}, BY_EPOCHS),
    "bert, the rest": ("bert", "SEQ_CLS", {"readout_blocks": 5, "readout_blocks_from": "next"}, BY_STEPS),
}


@pytest.mark.parametrize("run", RUNS)
def test_eight_steps_are_four_and_four(tmp_path, run):
    name, task, config, arguments = RUNS[run]
    whole = trainer_for(tmp_path, name, task, config, **arguments)
    whole.train()
    assert whole.state.global_step == 8
    resumed = trainer_for(tmp_path, name, task, config, **arguments)
    before = snapshot(resumed.model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 8
    assert changed(resumed.model, before) != set()
    assert_same(everything(whole), everything(resumed))
    assert losses(whole) == losses(resumed)
    assert len(losses(whole)) == 8
    chunks = len(whole.stages) if "train_chunks" not in config else 1
    assert len({key for entry in losses(whole) for key in entry if key.startswith("loss/chunk_")}) == chunks


def test_dropout_is_on_in_these_runs(tmp_path):
    """Else the comparison above would not notice a lost random state."""
    logged = []
    for seed in (1, 2):
        trainer = trainer_for(tmp_path, max_steps=1)
        model = trainer.model
        with torch.no_grad():
            for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
                parameter.fill_(0.1)
        trainer.args.seed = seed
        trainer.args.data_seed = 0
        torch.manual_seed(seed)
        trainer.train()
        logged.append(losses(trainer)[0])
    assert logged[0]["loss/chunk_1"] != logged[1]["loss/chunk_1"]
    assert logged[0]["loss/chunk_2"] != logged[1]["loss/chunk_2"]


def test_logs_between_checkpoints_are_the_same_means(tmp_path):
    arguments = BY_STEPS | {"logging_steps": 3}
    whole = trainer_for(tmp_path, **arguments)
    whole.train()
    resumed = trainer_for(tmp_path, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # The step between the last log and the checkpoint is not logged again: the mean is of the steps that ran.
    for one, other in zip(losses(whole), losses(resumed), strict=True):
        assert one.keys() == other.keys()
    assert losses(whole)[0] == losses(resumed)[0]


def test_a_run_resumes_where_a_crash_left_it(tmp_path):
    whole = trainer_for(tmp_path / "whole", **BY_STEPS)
    whole.train()
    crashed = trainer_for(tmp_path / "crashed", **BY_STEPS)
    original = crashed.training_step

    def dies_in_step_6(*args, **kwargs):
        if crashed.state.global_step == 5:
            raise Halt
        return original(*args, **kwargs)

    crashed.training_step = dies_in_step_6
    with pytest.raises(Halt):
        crashed.train()
    resumed = trainer_for(tmp_path / "crashed", **BY_STEPS)
    resumed.train(resume_from_checkpoint=True)
    assert_same(everything(whole), everything(resumed))


def test_the_best_metric_and_early_stopping_survive_resuming(tmp_path):
    arguments = BY_STEPS | {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    whole = trainer_for(tmp_path, "bert", "SEQ_CLS", **arguments)
    whole.train()
    resumed = trainer_for(tmp_path, "bert", "SEQ_CLS", **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.best_metric == whole.state.best_metric
    assert resumed.state.best_model_checkpoint == whole.state.best_model_checkpoint
    assert_same(snapshot(whole.model), snapshot(resumed.model))


def test_an_adapter_of_another_name_resumes(tmp_path):
    def make():
        model = get_peft_model(
            zoo.make_model("llama"), ZeroLockConfig(**zoo.lora_arguments("llama"), num_chunks=2), adapter_name="mine"
        )
        arguments = make_arguments(tmp_path, **BY_STEPS)
        rows = zoo.token_rows(16)
        return ZeroLockTrainer(model=model, args=arguments, train_dataset=rows, data_collator=zoo.collate)

    whole, resumed = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(everything(whole), everything(resumed))
    assert isinstance(PeftModel.from_pretrained(zoo.make_model("llama"), tmp_path / "checkpoint-8/mine"), PeftModel)


@pytest.mark.parametrize("by", ["load_adapter", "from_pretrained"])
@pytest.mark.parametrize(
    ("name", "config"), [("bert", {}), ("deberta", {}), ("bert", {"modules_to_save": ["pooler"]})]
)
def test_a_classifier_read_from_its_checkpoint_resumes(tmp_path, name, config, by):
    """PEFT names the heads again each time it takes a configuration that it wrote."""
    whole = make_trainer(tmp_path, name, "SEQ_CLS", config=config, **BY_STEPS)
    whole.train()
    folder = tmp_path / "checkpoint-4"
    model, given = zoo.make_model(name, "SEQ_CLS"), {}
    torch.manual_seed(1)
    if by == "load_adapter":
        model = load_adapter(model, folder, is_trainable=True)
    else:
        given = {"peft_config": ZeroLockConfig.from_pretrained(folder)}
        given["peft_config"].inference_mode = False  # PEFT saves every adapter for inference
    arguments, rows = make_arguments(tmp_path, **BY_STEPS), zoo.class_rows(16)
    resumed = ZeroLockTrainer(model=model, args=arguments, train_dataset=rows, data_collator=zoo.collate, **given)
    resumed.train(resume_from_checkpoint=str(folder))
    assert_same(snapshot(whole.model), snapshot(resumed.model))


# ---- refused ----


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of two chunks with a checkpoint at step 4."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer_for(folder, config={"readout": "adapter"}, **BY_STEPS | {"max_steps": 4}).train()
    return folder


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_chunks": 3}, r"num_chunks, chunk_sizes: \(2, None\) there, \(3, None\) now"),
        ({"num_chunks": None, "chunk_sizes": [1, 2]}, r"chunk_sizes: \(2, None\) there, \(2, \[1, 2\]\) now"),
        ({"alpha": 1.0}, "alpha: 0.7 there, 1.0 now"),
        ({"readout": "lm_head"}, "readout: 'adapter' there, 'lm_head' now"),
        ({"readout_dim": 8}, "readout_dim: None there, 8 now"),
        ({"consistency": "reverse"}, "consistency: 'forward' there, 'reverse' now"),
        ({"train_chunks": [1]}, r"train_chunks: None there, \[1\] now"),
        ({"r": 2}, "r: 4 there, 2 now"),
        ({"lora_alpha": 4}, "lora_alpha: 8 there, 4 now"),
        ({"target_modules": ["q_proj"]}, r"target_modules: \['q_proj', 'v_proj'\] there, \['q_proj'\] now"),
        ({"use_dora": True}, "use_dora: False there, True now"),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [True, "path"])
def test_other_settings_are_refused_by_name(stopped, config, told, given):
    trainer = trainer_for(stopped, config={"readout": "adapter"} | config, **BY_STEPS)
    before = snapshot(trainer.model)
    with pytest.raises(ValueError, match=told):
        trainer.train(resume_from_checkpoint=True if given is True else str(stopped / "checkpoint-4"))
    assert changed(trainer.model, before) == set()


def test_the_same_settings_said_otherwise_are_taken(stopped):
    config = {"readout": "adapter", "num_chunks": None, "logits_slice": 3}
    config |= {"target_modules": ["v_proj", "q_proj", "v_proj"]}
    trainer = trainer_for(stopped, config=config, **BY_STEPS | {"max_steps": 5, "save_strategy": "no"})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_readouts_of_another_shape_are_refused(stopped, tmp_path):
    """What the settings do not tell, such as the width of the model."""
    readouts = load_file(stopped / "checkpoint-4" / "readouts.safetensors")
    assert {name.split(".")[0] for name in readouts} == {"chunk_1"}
    wrong = {name: torch.nn.Parameter(torch.zeros(3)) for name in readouts}
    with pytest.raises(ValueError, match="does not fit"):
        load_tensors(str(stopped / "checkpoint-4"), READOUTS_NAME, wrong)
    with pytest.raises(ValueError, match="does not fit"):
        load_tensors(str(stopped / "checkpoint-4"), READOUTS_NAME, {})


def test_a_checkpoint_without_optimizer_state_is_refused(tmp_path):
    arguments = BY_STEPS | {"save_only_model": True}
    trainer_for(tmp_path, **arguments | {"max_steps": 4}).train()
    for given in (True, str(tmp_path / "checkpoint-4")):
        with pytest.raises(ValueError, match=r"optimizer\.pt.*save_only_model"):
            trainer_for(tmp_path, **arguments).train(resume_from_checkpoint=given)


def test_a_checkpoint_of_the_stock_trainer_is_refused(tmp_path):
    folder = Path(tmp_path, "checkpoint-4")
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    with pytest.raises(ValueError, match=r"zerolock_complete\.json"):
        trainer_for(tmp_path, **BY_STEPS).train(resume_from_checkpoint=str(folder))
