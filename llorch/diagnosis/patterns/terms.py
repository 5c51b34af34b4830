"""Terms of a sum that an engine left out, or counted another number of times: input columns of a product, or keys."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.patterns.axes import Axis, describe_indices
from llorch.diagnosis.patterns.location import UNEXPLAINED

MAX_TERMS = 2048  # most terms of a sum that are examined
MIN_EQUATIONS = 4  # entries of the result for each term
CLEAR = 0.02  # smallest distance of a count from 1, and largest distance of equal counts
TIMES = {0.0: "left out", 2.0: "counted twice", -1.0: "subtracted"}


def describe_product_terms(error: np.ndarray, x: np.ndarray, matrix: np.ndarray) -> str:
    """Describe the input columns that a product x @ matrix.T counts wrongly; empty if that does not explain its error.

    Args:
        error: The right product minus the engine's, (rows, outputs).
        x: Inputs, (rows, columns).
        matrix: Weights, (outputs, columns).
    """
    if x.shape[1] > MAX_TERMS or error.size < MIN_EQUATIONS * x.shape[1]:
        return ""
    gram = (x.T @ x) * (matrix.T @ matrix)
    projection = np.einsum("tk,tk->k", x, error @ matrix)
    return _describe("input column", gram, projection, error, lambda missing: (x * missing) @ matrix.T)


def describe_context_terms(error: np.ndarray, probs: np.ndarray, values: np.ndarray) -> str:
    """Describe the keys that the sum of values counts wrongly; empty if that does not explain its error.

    Args:
        error: The right contexts minus the engine's, (tokens, heads, head_dim).
        probs: Probabilities, (heads, tokens, keys).
        values: Cached values, (kv_heads, keys, head_dim).
    """
    n_keys = probs.shape[-1]
    if not 1 < n_keys <= MAX_TERMS or error.size < MIN_EQUATIONS * n_keys:
        return ""
    values = np.repeat(values, probs.shape[0] // values.shape[0], axis=0)
    gram = ((probs.swapaxes(1, 2) @ probs) * (values @ values.swapaxes(1, 2))).sum(axis=0)
    projection = np.einsum("htk,htk->k", probs, np.einsum("thd,hkd->htk", error, values))
    return _describe("key", gram, projection, error, lambda missing: np.einsum("htk,hkd->thd", probs * missing, values))


def _describe(
    noun: str, gram: np.ndarray, projection: np.ndarray, error: np.ndarray,
    predict: Callable[[np.ndarray], np.ndarray],
) -> str:  # fmt: skip
    """Fit how often each term is missing; describe it if all wrong terms are counted equally often.

    Sums with terms that are not finite are not examined.
    """
    if not (np.isfinite(gram).all() and np.isfinite(projection).all()):
        return ""
    missing = np.linalg.lstsq(gram, projection, rcond=1e-10)[0]
    wrong = np.flatnonzero(np.abs(missing) > CLEAR)
    if not len(wrong) or np.ptp(missing[wrong]) > CLEAR:
        return ""
    count = round(1 - float(np.median(missing[wrong])), 3)
    predicted = predict(np.where(np.isin(np.arange(len(missing)), wrong), 1 - count, 0.0))
    if not np.linalg.norm(error - predicted) <= UNEXPLAINED * np.linalg.norm(error):
        return ""
    labels = np.arange(len(missing))
    indices = describe_indices(Axis(noun, labels), labels[wrong], labels) or f"{len(wrong)} of {len(labels)} {noun}s"
    verb = "is" if len(wrong) == 1 else "are"
    return f"{indices} {verb} {TIMES.get(count, f'counted {count:g} times')}"
