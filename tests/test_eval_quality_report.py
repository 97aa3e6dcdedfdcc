"""The quality suite's report: intervals, pairs, tables, frontier and plots of known results."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import quality_plots
import quality_tables
from comparison import Comparison, load_results
from intervals import bootstrap, interval

EVAL = Path(__file__).resolve().parents[1] / "eval"
# By its path: the recipes have a module `report` too.
_report_spec = importlib.util.spec_from_file_location("eval_report", EVAL / "report.py")
report = importlib.util.module_from_spec(_report_spec)
_report_spec.loader.exec_module(report)

SETTINGS = {"bp": None, "last_2": {"num_chunks": 2, "train_chunks": [-1]}, "zl_2": {"num_chunks": 2}}


def result(experiment: str, method: str, seed: int, accuracy: float, nll: float, **values) -> dict:
    own = {"label": f"label of {method}", "trainer": "zerolock" if SETTINGS[method] else "bp"}
    own |= {"zerolock": SETTINGS[method]} if SETTINGS[method] else {}
    right = round(10 * accuracy)
    return {
        **{"experiment": experiment, "family": "f", "method": method, "seed": seed, "learning_rate": 1e-3},
        **{"tuning": False, "status": "ok", "accuracy": accuracy, "nll": nll, "test_size": 10, "train_tokens": 1000},
        "config": {"title": f"Table of {experiment}", "family_title": "Family", "method": own},
        **{"correct": "1" * right + "0" * (10 - right), "row_losses": " ".join([f"{nll:.4f}"] * 10)},
        **{"package_sha256": "code", "git_commit": "123456789", "train_cpu_seconds": 10.0, "train_steps": 2},
        **{"log": [{"step": 1, "loss": 0.9}, {"step": 2, "loss": nll}]},
        **values,
    }


@pytest.fixture
def results():
    memory = {"bp": 100, "last_2": 50, "zl_2": 60}
    seconds = {"bp": 10.0, "last_2": 5.0, "zl_2": 12.0}
    figures = {
        "bp": [(0.8, 0.50), (0.9, 0.48)],
        "last_2": [(0.6, 0.60), (0.7, 0.62)],
        "zl_2": [(0.8, 0.52), (0.8, 0.54)],
    }
    return [
        result(
            *(experiment, method, seed, accuracy, nll + shift),
            activation_bytes=memory[method],
            bp_activation_bytes=100,
            train_cpu_seconds=seconds[method],
        )
        for experiment, shift in (("a", 0.0), ("b", 0.1))
        for method, seeds in figures.items()
        for seed, (accuracy, nll) in enumerate(seeds)
    ]


def test_the_task_table_pairs_within_seeds(results):
    table = quality_tables.task_table(Comparison(results), "a")
    lines = [line for line in table.splitlines() if line.startswith("| label of")]
    # 95 % intervals of two values: 12.706 * (half their difference)
    assert lines[0].split(" | ")[:5] == ["| label of bp", "0.001", "0, 1", "0.850 ± 0.635", "0.490 ± 0.127"]
    assert [line.split(" ")[3] for line in lines] == ["bp", "last_2", "zl_2"]
    cells = lines[2].split(" | ")
    # One row in ten differs, with one seed of two: quantiles of (0, 1/2 or 1) * Binomial(10, 0.1) / 10.
    assert cells[5] == "-0.050 ± 0.635 [-0.200, +0.000]"
    assert cells[6] == "+0.040 ± 0.254 [+0.020, +0.060]"  # minus BP's NLL, rows alike: the seeds alone differ
    assert cells[8] == "-0.080 ± 0.000 [-0.080, -0.080]"  # minus the last chunk's
    assert cells[9:] == ["0.60", "1.20 |"]
    assert lines[1].split(" | ")[7:] == ["-", "-", "0.50", "0.50 |"]


def test_the_mean_over_tasks_has_one_pair_a_task_and_seed(results):
    comparison = Comparison(results)
    own = quality_tables.mean_over_tasks(comparison, "f")["zl_2"]
    assert own["tasks"] == 2
    assert own["nll minus BP's"] == pytest.approx([0.02, 0.06] * 2)
    assert own["nll minus last's"] == pytest.approx([-0.08] * 4)
    assert own["accuracy minus last's"] == pytest.approx([0.2, 0.1] * 2)
    assert "| label of zl_2 | 2 | 4 | -0.050 ±" in quality_tables.mean_table(comparison, "f")


def test_the_frontier_leaves_out_what_another_method_beats(results):
    def point(nll, held, cost):
        return {"nll minus BP's": [nll], "activations": [held], "CPU": [cost]}

    points = {"good": point(0.0, 0.5, 1.0), "light": point(0.1, 0.2, 1.0), "worse": point(0.1, 0.5, 1.0)}
    assert quality_tables.frontier(points) == {"good", "light"}
    assert quality_tables.frontier(points | {"unmeasured": point(0.0, 0.1, 0.1) | {"CPU": []}}) == {"good", "light"}
    summary = quality_tables.mean_over_tasks(Comparison(results), "f")
    assert quality_tables.frontier(summary) == {"bp", "last_2", "zl_2"}


def test_only_rows_at_the_best_rate_are_compared(results):
    tuning = [
        result("a", "bp", 9, 0.5, nll, tuning=True, learning_rate=rate) for rate, nll in ((1e-3, 0.6), (1e-2, 0.5))
    ]
    other = result("a", "bp", 0, 0.99, 0.1, learning_rate=1e-2)
    comparison = Comparison([*results, *tuning, other])
    assert comparison.rows["a"]["bp"] == {0: other}
    assert "| `bp` | 0.600 | **0.500** |" in quality_tables.quality_tables(comparison)


def test_failed_rows_and_mixed_states_are_told(results):
    results[-1] |= {"status": "failed", "error": "ValueError('no\nway')"}
    results[4]["package_sha256"], results[4]["git_commit"] = "newer", "abcdefgh"
    results[5]["config"]["method"]["zerolock"] = {"num_chunks": 2, "alpha": 0.5}
    text = quality_tables.quality_tables(Comparison(results))
    assert "* `b, zl_2, rate 0.001, seed 1`: ValueError('no" in text
    assert "2 states of the package: at or after 1234567, abcdefg" in text
    assert "Not the same settings for every seed: zl_2." in text


def test_intervals():
    assert interval([0.5]) == (0.5, None)
    mean, width = interval([0.80, 0.82, 0.84])
    assert mean == pytest.approx(0.82) and width == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)


def test_the_bootstrap_has_the_spread_of_seeds_and_rows_and_the_weights_of_rows():
    random = np.random.default_rng(1)
    of_rows, of_seeds = random.normal(size=(1, 400)), random.normal(size=(60, 1))
    low, high = bootstrap(of_rows + np.zeros((3, 1)))
    assert high - low == pytest.approx(2 * 1.96 * of_rows.std() / 20, rel=0.1)
    low, high = bootstrap(of_seeds + np.zeros((1, 5)))
    assert high - low == pytest.approx(2 * 1.96 * of_seeds.std() / 60**0.5, rel=0.1)
    assert bootstrap(np.array([[1.0, 1.0]]), np.array([3.0, 1.0])) == (1.0, 1.0)
    low, high = bootstrap(np.tile([0.0, 1.0], (1, 500)), np.tile([3.0, 1.0], 500))
    assert low < 0.25 < high < 0.5


def test_plots_show_what_was_measured(tmp_path, results):
    for found in results:
        if found["method"] == "zl_2":
            found["exits"] = [{"chunk": k, "depth": k / 2, "accuracy": k / 4 + found["seed"] / 10} for k in (1, 2)]
    comparison = Comparison(results)
    seeds = comparison.rows["a"]["zl_2"]
    assert quality_plots.loss_curve(seeds) == ([500.0, 1000.0], pytest.approx([0.9, 0.53]))
    assert quality_plots.exit_curve(seeds, "accuracy") == ([0.5, 1.0], pytest.approx([0.3, 0.55]))
    drawn = {path.name for path in quality_plots.draw_all(comparison, tmp_path)}
    assert drawn == {"loss_a.png", "loss_b.png", "exits_a.png", "exits_b.png", "frontier_f.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_results_of_the_first_round_are_still_told():
    text = quality_tables.quality_tables(Comparison(load_results(EVAL / "results" / "quality_first")))
    assert "| LoRA with BP | 0.001 | 0, 1, 2 | 0.844 ± 0.006 | 0.362 ± 0.011 | - | - | - | - | - | 1.00 |" in text


def test_the_report_goes_between_its_markers():
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.replace_report(page, "new") == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="needs one line"):
        report.replace_report("no markers", "new")


def test_a_folder_without_results_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="run_queue.py"):
        load_results(tmp_path)
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="it lacks"):
        load_results(tmp_path)
