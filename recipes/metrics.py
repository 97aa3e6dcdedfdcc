"""GLUE's metrics without the network: what ``evaluate.load("glue", task)`` computes, with scikit-learn and scipy."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import evaluate
import numpy as np
from scipy.stats import ConstantInputWarning, pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(accuracy_score(labels, predictions))


def _f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(f1_score(labels, predictions, pos_label=1, zero_division=0))


def _matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(matthews_corrcoef(labels, predictions))


def _correlation(function: Callable[..., Any], predictions: np.ndarray, labels: np.ndarray) -> float:
    """Zero where one side is constant, for which the correlation is not defined."""
    if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(function(predictions, labels).statistic)


def _pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    return _correlation(pearsonr, predictions, labels)


def _spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    return _correlation(spearmanr, predictions, labels)


METRICS: dict[str, dict[str, Callable[[np.ndarray, np.ndarray], float]]] = {
    "cola": {"matthews_correlation": _matthews},
    "sst2": {"accuracy": _accuracy},
    "mrpc": {"accuracy": _accuracy, "f1": _f1},
    "qqp": {"accuracy": _accuracy, "f1": _f1},
    "stsb": {"pearson": _pearson, "spearmanr": _spearman},
    "mnli": {"accuracy": _accuracy},
    "qnli": {"accuracy": _accuracy},
    "rte": {"accuracy": _accuracy},
    "wnli": {"accuracy": _accuracy},
}
"""Task to its metrics, by the names that GLUE gives them."""


def glue_metrics(task: str, predictions: Any, labels: Any) -> dict[str, float]:
    """The task's metrics.

    Args:
        task: one of ``METRICS``.
        predictions: ``(rows,)`` class numbers, or scores for "stsb".
        labels: ``(rows,)`` likewise.

    Returns:
        Metric to value. A constant prediction gives 0.0 for Matthews, F1 (of class 0) and both correlations.

    Raises:
        ValueError: an unknown task, no row, or lengths that differ.
    """
    if task not in METRICS:
        raise ValueError(f"task {task!r} is unknown; allowed are {', '.join(METRICS)}.")
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.shape != labels.shape or labels.ndim != 1 or not len(labels):
        raise ValueError(
            f"predictions of shape {predictions.shape} and labels of shape {labels.shape}: give one of each per row."
        )
    return {name: metric(predictions, labels) for name, metric in METRICS[task].items()}


def hub_metrics(task: str) -> Callable[[Any, Any], dict[str, float]]:
    """The same from the ``evaluate`` library, which fetches its script from the Hub.

    Raises:
        ValueError: the Hub cannot be reached.
    """
    try:
        metric = evaluate.load("glue", task)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"evaluate.load('glue', {task!r}) cannot reach the Hub ({error}): use --metrics local, which needs no "
            "network."
        ) from error
    return lambda predictions, labels: metric.compute(predictions=predictions, references=labels)


def compute_metrics_for(task: str, source: str = "local") -> Callable[[EvalPrediction], dict[str, float]]:
    """Trainer's ``compute_metrics`` for a task: the class with the largest logit, or the score itself for "stsb".

    Args:
        task: one of ``METRICS``.
        source: "local" (:func:`glue_metrics`), or "evaluate" (:func:`hub_metrics`).
    """
    measure = partial(glue_metrics, task) if source == "local" else hub_metrics(task)

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        predictions = logits.reshape(len(logits)) if task == "stsb" else logits.argmax(axis=-1)
        return measure(predictions, output.label_ids)

    return compute_metrics
