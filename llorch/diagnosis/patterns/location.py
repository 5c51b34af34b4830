"""Location of an error: the indices of each axis that have 99 % of it, while all others are right."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llorch.diagnosis.patterns.axes import Axis, describe_indices, join_words

UNEXPLAINED = 0.01  # largest share of the error that a pattern leaves
RIGHT = 4.0  # in tolerances: a slice with a smaller error is right
MIN_RIGHT = 8  # entries: fewer may be right by chance
MANY = 3  # words are joined by commas alone from here on


@dataclass(frozen=True)
class Location:
    """Part of an array that has the error.

    Attributes:
        mask: True for the entries of the part, in the array's shape.
        words: Words for the part, such as `heads 10 and 11 only`; empty if it is the whole array.
    """

    mask: np.ndarray
    words: str


def locate(error: np.ndarray, expected: np.ndarray, axes: Sequence[Axis], tolerance: float) -> Location:
    """Locate an error (absolute differences) by the indices of axes, or by the distance of keys from their query.

    An axis whose wrong indices have no short words counts as wrong everywhere. Of two locations the denser one counts.
    """
    across = [axis for axis in axes if axis.dimension is None]
    along = [axis for axis in axes if axis.dimension is not None]
    is_wrong = error > RIGHT * tolerance * np.sqrt(np.square(expected).mean())
    locations = [_locate(error, expected, choice, tolerance) for choice in (along, across) if choice]
    return max(locations, key=lambda location: float(is_wrong[location.mask].mean()))


def _locate(error: np.ndarray, expected: np.ndarray, axes: Sequence[Axis], tolerance: float) -> Location:
    mask, words = np.ones(error.shape, bool), []
    for axis in axes:
        chosen, labels = _wrong_labels(error, expected, axis, tolerance)
        if description := describe_indices(axis, chosen, labels):
            mask &= np.isin(axis.labels, chosen)
            words.append(description)
    if not words or np.linalg.norm(error[~mask]) > UNEXPLAINED * np.linalg.norm(error):
        return Location(np.ones(error.shape, bool), "")
    return Location(mask, f"{join_words(words) if len(words) < MANY else ', '.join(words)} only")


def _wrong_labels(
    error: np.ndarray, expected: np.ndarray, axis: Axis, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels of an axis whose entries are wrong, and all labels, sorted; none is wrong if few are right."""
    labels, index = np.unique(axis.labels, return_inverse=True)
    index = np.broadcast_to(index.reshape(axis.labels.shape), error.shape).ravel()
    errors, sizes, counts = (
        np.bincount(index, weights=weights, minlength=len(labels))
        for weights in (np.square(error).ravel(), np.square(expected).ravel(), np.ones(error.size))
    )
    mean_square = sizes.sum() / counts.sum()
    is_wrong = errors > np.square(RIGHT * tolerance) * np.maximum(sizes, mean_square * counts)
    return labels[is_wrong & (counts[~is_wrong].sum() >= MIN_RIGHT)], labels
