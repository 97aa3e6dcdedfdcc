"""A run warns once when the last chunk gains nothing on the readout before it."""

import pytest
from training import make_trainer

from peft_zerolock.diagnosis import DepthWatch


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    chunks = {"num_chunks": 3, "readout_blocks": 0}
    return make_trainer(tmp_path_factory.mktemp("run"), chunks=chunks).stages


def _losses(lower, last):
    return {"loss/chunk_1": 9.0, "loss/chunk_2": lower, "loss/chunk_3": last}


def _look(watch, steps, lower, last):
    for step in steps:
        watch.look(_losses(lower, last), step, 100, micro_batches=2)


def test_it_names_both_losses_and_the_settings_once(stages, caplog):
    watch = DepthWatch(stages, stages[0].config)
    _look(watch, range(10, 101, 10), 0.5, 0.75)
    assert len(caplog.records) == 1
    for told in ("0.7500", "chunk_2's readout 0.5000", "30 update windows", "readout_blocks, now 0", "readout_rows"):
        assert told in caplog.text
    for told in ("num_chunks, now 3", "train_chunks=[-1]"):
        assert told in caplog.text


def test_falling_losses_need_no_warning(stages, caplog):
    _look(DepthWatch(stages, stages[0].config), range(10, 101, 10), 0.5, 0.4999)
    assert not caplog.records


def test_the_first_half_and_little_evidence_do_not_count(stages, caplog):
    watch = DepthWatch(stages, stages[0].config)
    _look(watch, [10, 20, 30, 40, 50], 0.5, 0.75)
    _look(watch, [60, 70], 0.5, 0.75)  # 20 windows of 2 micro-batches
    assert not caplog.records
    watch.look(_losses(2.5, 0.0), 80, 100, 2)  # over the 30, the mean is below
    assert not caplog.records


def test_readouts_as_deep_as_the_model_are_not_compared(tmp_path, caplog):
    stages = make_trainer(tmp_path, chunks={"num_chunks": 3, "readout_blocks": "all"}).stages
    _look(DepthWatch(stages, stages[0].config), range(10, 101, 10), 0.5, 0.75)
    assert "gains nothing" not in caplog.text


def test_a_run_warns(tmp_path, caplog):
    """The adapters' rate is so low that they learn nothing; the readout before the last chunk learns all there is."""
    chunks = {"chunk_sizes": [2, 1], "readout": "adapter", "readout_learning_rate": 0.03}
    trainer = make_trainer(
        tmp_path,
        chunks=chunks,
        max_steps=60,
        learning_rate=1e-8,
        gradient_accumulation_steps=2,
        logging_steps=5,
        per_device_train_batch_size=8,
    )
    trainer.train()
    assert caplog.text.count("The last chunk gains nothing on the chunk before it") == 1
