"""Means with 95 % intervals: over seeds (Student's t), and over seeds and test rows together (bootstrap)."""

import statistics

import numpy as np
from scipy.stats import t as student

DRAWS = 2000


def interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval (Student's t); no width for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def bootstrap(differences: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """95 % interval of the mean difference when both the seeds and the test rows are drawn anew.

    Args:
        differences: `(seeds, rows)`, of two methods on the same test row with the same seed.
        weights: `(rows,)`, the share that each row has in the mean; default: equal ones.

    Returns:
        The 2.5 % and the 97.5 % quantile over `DRAWS` draws (percentile bootstrap; the rows drawn are the same for
        every seed, as the test set is). Repeatable.
    """
    seeds, rows = differences.shape
    random = np.random.default_rng(0)
    weights = np.ones(rows) if weights is None else weights
    of_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds
    of_rows = random.multinomial(rows, np.full(rows, 1 / rows), size=DRAWS) * weights
    means = ((of_seeds @ differences) * of_rows).sum(1) / of_rows.sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def show(values: list[float], sign: str = "") -> str:
    """Values as `mean ± half width`, or as a dash if there are none."""
    if not values:
        return "-"
    mean, width = interval(values)
    return f"{mean:{sign}.3f}" + ("" if width is None else f" ± {width:.3f}")
