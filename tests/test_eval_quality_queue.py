"""The quality suite's queue: which row comes when, learning rates, claims, and rows in processes of their own."""

import argparse
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval" / "quality"))

import run_queue  # noqa: E402
import specs  # noqa: E402
from claims import claim  # noqa: E402
from rows import Row, best_rate, mean_losses, read_result, write_result  # noqa: E402

TINY = """
methods:
  bp: {label: BP, trainer: bp}
  zl: {label: ZeroLock, trainer: zerolock, zerolock: {num_chunks: 2}}
families:
  small: {title: S, model: {}, lora: {}, training: {}, learning_rates: [1.0e-3, 1.0e-2], tune_on: [a],
          tune_seed: 9}
  one_rate: {title: One, model: {}, lora: {}, training: {}, learning_rates: [1.0e-4], tune_on: [c], tune_seed: 9}
experiments:
  a: &a
    family: small
    title: A
    kind: classification
    max_tokens: 8
    data: {folder: a, text: t, train_file: x, train_size: 1, tune_size: 1, test_files: [y], test_size: null,
           selection_seed: 0}
  b: *a
  c: {<<: *a, family: one_rate}
order:
  - {experiments: [c, b], methods: [bp, zl], seeds: [0, 1]}
"""
SMALL_RATE, LARGE_RATE = 1e-3, 1e-2


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "experiments.yaml"
    path.write_text(TINY, encoding="utf-8")
    return specs.load_suite(path)


def finish(row: Row, results: Path, status: str = "ok", **values) -> None:
    code = {"package_sha256": run_queue.package_fingerprint()}
    write_result(row.result_file(results), {**asdict(row), "status": status, **code, **values})


def tuning(method: str, rate: float) -> Row:
    return Row("a", method, 9, rate, tuning=True)


def test_rows_of_a_method_follow_from_its_tuning_rows(tmp_path, suite):
    rows, waiting = run_queue.plan(suite, tmp_path)
    untuned = [Row("c", method, seed, 1e-4) for seed in (0, 1) for method in ("bp", "zl")]
    tuned = [tuning(method, rate) for method in ("bp", "zl") for rate in (SMALL_RATE, LARGE_RATE)]
    assert rows == [*untuned[:2], *tuned, *untuned[2:]]
    assert waiting == ["b.bp.seed0", "b.zl.seed0", "b.bp.seed1", "b.zl.seed1"]
    finish(tuned[0], tmp_path, nll=0.5)
    assert len(run_queue.plan(suite, tmp_path)[0]) == 8  # one of two rates says nothing yet
    finish(tuned[1], tmp_path, nll=0.4)
    rows, waiting = run_queue.plan(suite, tmp_path)
    assert [row for row in rows if row.experiment == "b"] == [Row("b", "bp", seed, LARGE_RATE) for seed in (0, 1)]
    assert waiting == ["b.zl.seed0", "b.zl.seed1"]
    rows, _ = run_queue.plan(suite, tmp_path, match="b.bp.*1")
    assert rows == [*tuned[:2], Row("b", "bp", 1, LARGE_RATE)]


def test_rates_that_failed_or_diverged_are_not_chosen(tmp_path, suite):
    finish(tuning("bp", SMALL_RATE), tmp_path, nll=0.6)
    finish(tuning("bp", LARGE_RATE), tmp_path, status="failed", error="diverged")
    assert Row("b", "bp", 0, SMALL_RATE) in run_queue.plan(suite, tmp_path)[0]
    finish(tuning("bp", SMALL_RATE), tmp_path, nll=float("nan"))
    assert "b.bp.seed0" in run_queue.plan(suite, tmp_path)[1]


def test_the_best_rate_has_the_lowest_mean_loss_over_the_tuning_experiments():
    results = [
        {"learning_rate": rate, name: loss}
        for rate, losses in {0.1: (1.0, 0.2), 0.2: (0.5, 0.6), 0.3: (0.1, float("inf"))}.items()
        for name, loss in zip(("nll", "mse"), losses, strict=True)
    ]
    losses = mean_losses(results)
    assert losses == {0.1: pytest.approx(0.6), 0.2: pytest.approx(0.55), 0.3: float("inf")}
    assert best_rate(losses) == 0.2
    assert best_rate({0.1: float("inf")}) is None and best_rate({}) is None


@pytest.fixture
def worker(tmp_path, suite, monkeypatch):
    """A worker whose rows are noted in `ran` and are done at once."""
    out = tmp_path / "results"
    arguments = argparse.Namespace(experiments=tmp_path / "experiments.yaml", out=out, match="*", commit=False)
    worker = run_queue.Worker(arguments, set())
    worker.ran = []

    def note(row, held):
        worker.ran.append(row)
        finish(row, out, nll=row.learning_rate)

    monkeypatch.setattr(worker, "run_in_process", note)
    return worker


def test_a_worker_runs_everything_once_and_each_method_at_its_best_rate(worker):
    worker.run()
    assert len(worker.ran) == len(set(worker.ran)) == 12
    assert {row.learning_rate for row in worker.ran if row.experiment == "b"} == {SMALL_RATE}
    assert worker.run_next() == (False, False)


def test_the_order_may_change_while_the_queue_runs(worker, capsys):
    path = worker.arguments.experiments
    assert worker.run_next() == (True, False)
    path.write_text(TINY.replace("methods: [bp, zl]", "methods: [zl]"), encoding="utf-8")
    worker.run_next()
    path.write_text("methods: {", encoding="utf-8")
    worker.run_next()
    assert [row.method for row in worker.ran] == ["bp", "zl", "zl"]
    assert "not valid YAML" in capsys.readouterr().out


def test_failed_rows_run_again_after_a_change_of_the_code_or_on_request(worker):
    out = worker.arguments.out
    worker.run()
    failed, changed = Row("c", "bp", 0, 1e-4), Row("c", "zl", 0, 1e-4)
    finish(failed, out, status="failed")
    finish(changed, out, status="failed", package_sha256="older")
    worker.ran.clear()
    worker.run()
    assert worker.ran == [changed]
    finish(failed, out, status="failed")
    worker.retry = {failed}
    worker.run()
    assert worker.ran == [changed, failed]


def test_a_claimed_row_is_left_to_its_worker(worker):
    first = Row("c", "bp", 0, 1e-4)
    with claim(worker.arguments.out / "claims" / f"{first.name}.lock") as held:
        assert held is not None
        assert worker.run_next() == (True, True)
        assert worker.ran == [Row("c", "zl", 0, 1e-4)]
    worker.run_next()
    assert worker.ran[-1] == first


def test_a_claim_ends_with_the_last_process_that_holds_it(tmp_path):
    path = tmp_path / "claims" / "row.lock"
    hold = "import sys, time; print('held', flush=True); time.sleep(60)"
    with claim(path) as held:
        child = subprocess.Popen([sys.executable, "-c", hold], pass_fds=[held], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
    with claim(path) as held:
        assert held is None  # the child still works on the row
    child.kill()
    child.communicate()
    with claim(path) as held:
        assert held is not None


def test_rows_that_cannot_start_are_results_too(tmp_path, suite):
    out = tmp_path / "results"
    options = {"threads": 1, "data": tmp_path, "out": out, "match": "c.bp.seed0", "commit": False}
    arguments = argparse.Namespace(experiments=tmp_path / "experiments.yaml", **options)
    run_queue.Worker(arguments, set()).run()
    result = read_result(Row("c", "bp", 0, 1e-4).result_file(out))
    assert result["status"] == "failed" and "package" in result["error"]
    assert result["config"]["method"] == {"label": "BP", "trainer": "bp"}
