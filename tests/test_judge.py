"""The judge: what lowers the final loss stands, what raises it is halved or undone, and undoing leads to pauses."""

import pytest
import torch
from peft import get_peft_model
from training import largest_difference, make_trainer, weights
from transformers import TrainerCallback
from zoo import collate, lora_arguments, make_model, token_rows

from peft_zerolock import ZeroLockConfig
from peft_zerolock.judge import Judge
from peft_zerolock.stage import Entry
from peft_zerolock.staging import build_stages


class Judged:
    """A model of three chunks, eight rows as parts, and the gradients of the model's loss."""

    def __init__(self):
        config = ZeroLockConfig(**lora_arguments("llama", r=8, target_modules="all-linear"), num_chunks=3)
        self.model = get_peft_model(make_model("llama", initializer_range=0.3), config)
        self.stages = build_stages(self.model, config, sliced=True)
        for stage in self.stages:
            for name, parameter in stage.adapters.items():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        batch = collate(token_rows(8).rows)
        count = (batch["labels"][:, 1:] != -100).sum()
        self.batch, self.parts = batch, [Entry(batch, count).take([i], 1.0) for i in range(8)]
        self.judge = Judge(self.stages)
        self.chunks = [list(stage.adapters.values()) for stage in self.stages]
        self.adapters = self.chunks[0]
        self.slopes = [torch.autograd.grad(self.loss(), adapters) for adapters in self.chunks]

    def loss(self):
        return self.model(**self.batch).loss

    def move(self, length: float, chunk: int = 0) -> None:
        """Moves a chunk along the first descent direction of the final loss, or against it."""
        with torch.no_grad():
            for parameter, slope in zip(self.chunks[chunk], self.slopes[chunk], strict=True):
                parameter -= length * slope

    def verdict(self, parts=None) -> dict[str, float]:
        return self.judge.judge(self.parts if parts is None else parts, None)


@pytest.fixture
def judged():
    torch.manual_seed(0)
    return Judged()


def copies(parameters):
    return [p.detach().clone() for p in parameters]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_lowers_the_final_loss_stands(judged):
    before = judged.loss().item()
    judged.move(0.5)
    trained = copies(judged.adapters)
    assert judged.verdict() == {"chunk_1": 1.0}
    assert equal(trained, judged.adapters)
    assert judged.loss().item() < before - 0.01


def test_what_raises_it_is_undone_to_the_bit(judged):
    accepted, before = copies(judged.adapters), judged.loss().item()
    judged.move(-2.0)
    assert judged.loss().item() > before + 0.01
    assert judged.verdict() == {"chunk_1": 0.0}
    assert equal(accepted, judged.adapters)


def test_a_step_that_is_too_long_is_halved(judged):
    accepted = copies(judged.adapters)
    lengths = [2.0**n for n in range(-2, 8)]
    losses = []
    for length in lengths:
        judged.move(length)
        losses.append(judged.loss().item())
        judged.move(-length)
    best = lengths[losses.index(min(losses))]
    with torch.no_grad():
        for parameter, start in zip(judged.adapters, accepted, strict=True):
            parameter.copy_(start)
    judged.move(2 * best)
    trained = copies(judged.adapters)
    assert judged.verdict() == {"chunk_1": 0.5}
    for parameter, start, end in zip(judged.adapters, accepted, trained, strict=True):
        assert torch.allclose(parameter, (start + end) / 2, atol=1e-6)
    assert judged.loss().item() == pytest.approx(min(losses), abs=1e-5)
    judged.move(-4 * best)
    assert judged.verdict() == {"chunk_1": 0.0}  # back to the half, not to the start
    assert judged.loss().item() == pytest.approx(min(losses), abs=1e-5)


def test_a_difference_within_the_noise_stands(judged):
    """Along a direction in which the rows do not agree: four rows' gradient against that of the others."""
    halves = [
        torch.autograd.grad(judged.model(**{k: v[rows] for k, v in judged.batch.items()}).loss, judged.adapters)
        for rows in (slice(0, 4), slice(4, 8))
    ]
    with torch.no_grad():
        for parameter, one, other in zip(judged.adapters, *halves, strict=True):
            parameter += 0.05 * (one - other)
    trained = copies(judged.adapters)
    assert judged.verdict() == {"chunk_1": 1.0}
    assert equal(trained, judged.adapters)


def test_one_part_cannot_tell_gain_from_noise(judged):
    judged.move(-2.0)
    trained = copies(judged.adapters)
    whole = Entry(judged.batch, judged.parts[0].count)
    assert judged.verdict([whole]) == {"chunk_1": 1.0}
    assert equal(trained, judged.adapters)


def test_each_lower_chunk_is_judged_on_what_stands_below_it(judged):
    """And the losses are compared by sums over all processes."""
    accepted = copies(judged.chunks[1])
    judged.move(-2.0)
    judged.move(-2.0, chunk=1)
    messages = []
    verdict = judged.judge.judge(judged.parts, None, lambda sums: messages.append(sums) or sums)
    assert verdict == {"chunk_1": 0.0, "chunk_2": 0.0}
    assert equal(accepted, judged.chunks[1])
    assert [message.shape for message in messages] == [(2, 3), (2, 3)]
    assert all(message[:, 0].tolist() == [8, 8] for message in messages)
    assert all(message[1, 1] > 0 for message in messages)


def test_pauses_double_until_something_stands(judged):
    history = []
    for _ in range(9):
        if 0 not in judged.judge.paused:
            judged.move(-2.0)
            history.append("learns")
        else:
            history.append("paused")
        assert judged.verdict() == {"chunk_1": 0.0}
    assert history == ["learns", "learns", "paused", "learns", "paused", "paused", "learns", "paused", "paused"]
    for _ in range(2):
        assert judged.judge.paused == {0}
        assert judged.verdict() == {"chunk_1": 0.0}
    assert judged.judge.paused == set()
    judged.move(0.5)
    assert judged.verdict() == {"chunk_1": 1.0}
    judged.move(-2.0)
    assert judged.verdict() == {"chunk_1": 0.0}
    assert judged.judge.paused == set()  # the count of undone ones began anew


def test_judging_leaves_modes_graphs_and_random_numbers_alone(judged):
    judged.move(0.1)
    modes = [m.training for stage in judged.stages for t in stage.trees().values() for m in t.modules()]
    state = torch.get_rng_state()
    judged.verdict()
    assert modes == [m.training for stage in judged.stages for t in stage.trees().values() for m in t.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in judged.model.parameters())
    assert judged.verdict() == {}  # nothing has changed since


# ---- in a trainer ----


@pytest.mark.parametrize(
    ("name", "task", "more"),
    [("llama", "CAUSAL_LM", {}), ("llama", "CAUSAL_LM", {"logits_slice": None}), ("bert", "SEQ_CLS", {})],
)
def test_a_judge_that_lets_everything_stand_changes_nothing(tmp_path, name, task, more):
    settings = {"lora": {"lora_dropout": 0.2}, "max_steps": 6, "learning_rate": 1e-3}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    plain = make_trainer(tmp_path, name, task, chunks={"num_chunks": 2, **more}, **settings)
    plain.train()
    judged = make_trainer(tmp_path, name, task, chunks={"num_chunks": 2, "judge_every": 3, **more}, **settings)
    judged.train()
    shares = [entry["judge/chunk_1"] for entry in judged.state.log_history if "judge/chunk_1" in entry]
    assert shares == [1.0]
    assert [entry["step"] for entry in judged.state.log_history if "judge/chunk_1" in entry] == [4]
    assert largest_difference(weights(plain), weights(judged)) == 0.0


def test_a_paused_chunk_s_adapters_wait_and_its_readout_learns(tmp_path):
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "judge_every": 1}, max_steps=5)
    seen, moved = [], []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            stage = trainer.stages[0]
            seen.append([copies(parameters.values()) for parameters in (stage.adapters, stage.readout)])
            if len(seen) > 1:
                moved.append([not equal(a, b) for a, b in zip(*seen[-2:], strict=True)])
            if state.global_step == 2:
                trainer._judge.state()["chunk_1.counts"][1] = 3

    trainer.add_callback(Watch())
    trainer.train()
    assert moved == [[True, True], [False, True], [False, True], [True, True]]
    shares = [entry.get("judge/chunk_1") for entry in trainer.state.log_history if "loss" in entry]
    assert shares[2:] == [0.0, 0.0, 0.0]


def test_the_empty_window_at_the_end_of_a_stream_is_not_judged(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(token_rows(8).rows)

    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "judge_every": 2}, data=Stream(), max_steps=8)
    judged, judge = [], Judge.judge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "judge", lambda *args: judged.append(trainer.state.global_step) or judge(*args))
        trainer.train()
    assert trainer.state.global_step == 8
    assert judged == [2, 4, 6]


def test_one_row_in_a_window_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, chunks={"num_chunks": 2, "judge_every": 1}, per_device_train_batch_size=1)
    with pytest.raises(ValueError, match=r"judge_every=1 with one row.*gradient_accumulation_steps"):
        trainer.train()
    assert trainer.state.global_step == 0
