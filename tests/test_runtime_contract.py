"""What runtime='concurrent' refuses, before any work, and what it warns of."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from small_runs import make_arguments, make_trainer, snapshot
from transformers import HfArgumentParser

from peft_zerolock import ZeroLockConfig, ZeroLockTrainingArguments
from peft_zerolock.contract import check_runtime
from peft_zerolock.runtime import Trace

CONFIG = ZeroLockConfig(num_chunks=2)


def test_arguments_are_parsed_from_flags(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--runtime", "concurrent", "--devices", "cpu", "cpu"]
    flags += ["--in_flight_depth", "3", "--trace", "somewhere"]
    (arguments,) = HfArgumentParser(ZeroLockTrainingArguments).parse_args_into_dataclasses(flags)
    assert (arguments.runtime, arguments.devices) == ("concurrent", ["cpu", "cpu"])
    assert (arguments.in_flight_depth, arguments.trace) == (3, "somewhere")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"runtime": "parallel"}, r"runtime='parallel'.*'sequential' or 'concurrent'"),
        ({"devices": ["cpu"]}, r"devices=\['cpu'\] belongs to runtime='concurrent'"),
        ({"trace": "x"}, r"trace='x' belongs to runtime='concurrent'"),
        ({"runtime": "concurrent", "in_flight_depth": 0}, r"in_flight_depth=0.*whole number >= 1"),
        ({"runtime": "concurrent", "in_flight_depth": 1.5}, r"in_flight_depth=1\.5"),
        ({"runtime": "concurrent", "devices": ["cpu", "gpu1"]}, r"'gpu1'.*no device.*'cuda:0'"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, arguments, told):
    with pytest.raises(ValueError, match=told):
        make_arguments(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"world_size": 2}, "2 processes.*without a launcher"),
        ({"fp16": True}, "fp16.*bf16=True"),
        ({"torch_compile": True}, "torch_compile.*Leave it out"),
        ({"optim": "schedule_free_adamw"}, "schedule_free_adamw"),
    ],
)
def test_what_cannot_work_is_refused(changes, told):
    given = {"world_size": 1, "fp16": False, "torch_compile": False, "optim": "adamw_torch"}
    arguments = SimpleNamespace(**given, runtime="concurrent")
    check_runtime(arguments, CONFIG, None, None)
    vars(arguments).update(changes)
    with pytest.raises(ValueError, match=told):
        check_runtime(arguments, CONFIG, None, None)
    arguments.runtime = "sequential"
    check_runtime(arguments, CONFIG, None, None)


def test_readouts_of_current_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"readout_weights='current'.*readout_weights='own'"):
        make_trainer(tmp_path, runtime="concurrent", config={"readout": "blocks", "readout_weights": "current"})


def test_a_given_optimizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"optimizer given to the trainer.*optimizer_cls_and_kwargs"):
        check_runtime(make_arguments(tmp_path, runtime="concurrent"), CONFIG, None, torch.optim.SGD([torch.ones(1)]))


def test_too_few_devices_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=re.escape("devices=['cpu', 'cpu'] are 2, and the model has 3 chunk(s)")):
        make_trainer(tmp_path, runtime="concurrent", devices=["cpu", "cpu"], config={"num_chunks": 3})


def test_draws_from_the_global_generator_are_told_once(tmp_path, caplog):
    trainer = make_trainer(tmp_path, runtime="concurrent", model={"attention_dropout": 0.1}, max_steps=1)
    trainer.train()
    trainer.train()
    told = [record.message for record in caplog.records if "not repeatable" in record.message]
    assert len(told) == 1
    assert told[0].startswith("chunk_1, chunk_2 draw(s)")


def test_draws_from_the_global_generator_are_refused_with_checkpointing(tmp_path):
    trainer = make_trainer(
        tmp_path, runtime="concurrent", model={"attention_dropout": 0.1}, activation_checkpointing=True
    )
    before = snapshot(trainer.model)
    with pytest.raises(ValueError, match=r"chunk_1, chunk_2 draw.*attention dropout to 0"):
        trainer.train()
    after = snapshot(trainer.model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_trace_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"trace='here'.*pip install matplotlib"):
        Trace("here")
