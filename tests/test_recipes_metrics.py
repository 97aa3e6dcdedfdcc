"""GLUE's metrics equal scikit-learn's and scipy's, and a constant prediction is no trouble."""

import numpy as np
import pytest
from metrics import METRICS, compute_metrics_for, glue_metrics
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction


@pytest.mark.parametrize("task", METRICS)
def test_metrics_equal_those_of_scikit_learn_and_scipy(task):
    random = np.random.default_rng(0)
    labels = random.uniform(0, 5, 50) if task == "stsb" else random.integers(0, 3 if task == "mnli" else 2, 50)
    predictions = labels + random.normal(size=50) if task == "stsb" else np.where(random.random(50) < 0.7, labels, 0)
    expected = {
        "cola": lambda: {"matthews_correlation": matthews_corrcoef(labels, predictions)},
        "stsb": lambda: {"pearson": pearsonr(predictions, labels)[0], "spearmanr": spearmanr(predictions, labels)[0]},
        "mrpc": lambda: {"accuracy": accuracy_score(labels, predictions), "f1": f1_score(labels, predictions)},
    }
    expected["qqp"] = expected["mrpc"]
    others = {"accuracy": np.mean(labels == predictions)}
    assert glue_metrics(task, predictions, labels) == pytest.approx(expected.get(task, lambda: others)(), abs=1e-12)


@pytest.mark.filterwarnings("error")
def test_constant_predictions_give_zero():
    assert glue_metrics("stsb", [2.5] * 4, [0.0, 1.0, 2.0, 5.0]) == {"pearson": 0.0, "spearmanr": 0.0}
    assert glue_metrics("stsb", [1.0], [2.0]) == {"pearson": 0.0, "spearmanr": 0.0}
    assert glue_metrics("cola", [1] * 4, [0, 1, 0, 1]) == {"matthews_correlation": 0.0}
    assert glue_metrics("mrpc", [0] * 4, [0, 1, 0, 1]) == {"accuracy": 0.5, "f1": 0.0}


def test_metrics_of_logits_and_of_scores():
    logits = np.array([[0.1, 2.0], [3.0, 1.0], [0.0, 1.0]])
    labels = np.array([1, 0, 0])
    assert compute_metrics_for("rte")(EvalPrediction(logits, labels)) == {"accuracy": pytest.approx(2 / 3)}
    assert compute_metrics_for("rte")(EvalPrediction((logits, logits), labels)) == {"accuracy": pytest.approx(2 / 3)}
    scores = compute_metrics_for("stsb")(EvalPrediction(np.array([[1.0], [2.0], [4.0]]), np.array([0.0, 1.0, 3.0])))
    assert scores == {"pearson": pytest.approx(1), "spearmanr": pytest.approx(1)}


def test_wrong_metric_inputs_are_refused():
    with pytest.raises(ValueError, match="task 'sst' is unknown; allowed are cola, sst2"):
        glue_metrics("sst", [1], [1])
    with pytest.raises(ValueError, match=r"shape \(2, 1\) and labels of shape \(2,\)"):
        glue_metrics("sst2", [[1], [0]], [1, 0])


def test_the_evaluate_library_is_used_where_it_can_be_reached(monkeypatch):
    class Loaded:
        def compute(self, predictions, references):
            return {"accuracy": float((predictions == references).mean())}

    monkeypatch.setattr(
        "metrics.evaluate.load", lambda name, task: Loaded() if (name, task) == ("glue", "rte") else None
    )
    compute = compute_metrics_for("rte", "evaluate")
    output = EvalPrediction(predictions=np.array([[0.0, 1.0], [1.0, 0.0]]), label_ids=np.array([1, 1]))
    assert compute(output) == {"accuracy": 0.5} == compute_metrics_for("rte")(output)


def test_an_unreachable_metric_says_what_to_use():
    with pytest.raises(ValueError, match="--metrics local, which needs no network"):
        compute_metrics_for("rte", "evaluate")
