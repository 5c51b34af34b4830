"""Axes of a stage's array, and words for a set of indices on them: `heads 10 and 11`, `odd positions from 257 on`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llorch.families.config import ModelConfig
from llorch.stages.table import Stage

NOUNS = {
    "seq": "position", "ctx": "key", "heads": "head", "kv_heads": "head", "k_heads": "head", "v_heads": "head",
    "head_dim": "dim", "key_dim": "dim", "value_dim": "dim", "experts": "expert", "topk": "expert slot", "taps": "tap",
    "vocab": "token id",
}  # fmt: skip
ROWS = ("position", "token")  # nouns of the axis of rows
N_LISTED = 4  # most indices that are listed one by one
MIN_PERIODS = 2  # fewest periods that show a remainder


@dataclass(frozen=True)
class Axis:
    """Axis of an array.

    Attributes:
        noun: Name of one index, such as `head`.
        labels: Numbers of the indices, shaped to broadcast over the array.
        dimension: Dimension of the array; None for an axis across dimensions, such as the distance of a key.
    """

    noun: str
    labels: np.ndarray
    dimension: int | None = None


def split_heads(array: np.ndarray, stage: Stage, config: ModelConfig) -> np.ndarray:
    """Reshape a joined width of heads to (heads, dims); other axes stay."""
    width = _head_width(stage.axes.split()[-1], config)
    return array.reshape(*array.shape[:-1], -1, width) if width else array


def _head_width(axis: str, config: ModelConfig) -> int:
    """Return the number of columns of one head in a joined width; 0 for other axes."""
    if axis == "value_width" and config.delta_net is not None:
        return config.delta_net.value_head_dim
    return {"q_width": config.head_dim, "kv_width": config.head_dim, "q_and_gate": 2 * config.head_dim}.get(axis, 0)


def axes_of(
    stage: Stage, shape: Sequence[int], positions: np.ndarray, own_keys: np.ndarray, first_key: int = 0,
    first_head: int = 0,
) -> list[Axis]:  # fmt: skip
    """List the axes of an array with split heads, and the distance of keys from the query if it has both.

    `own_keys` are the indices of the tokens in the cache, `first_key` is that of the array's first key, and
    `first_head` the number of its first head.
    """
    names = stage.axes.split()
    if len(names) < len(shape):
        names = [*names[:-1], "heads", "head_dim"]
    axes = []
    for dimension, (name, size) in enumerate(zip(names, shape, strict=True)):
        noun = NOUNS.get(name, "column")
        first = {"key": first_key, "head": first_head}.get(noun, 0)
        labels = positions if name == "seq" else first + np.arange(size)
        axes.append(Axis(noun, _along(labels, dimension, len(shape)), dimension))
    if {"seq", "ctx"} <= set(names):
        queries = _along(own_keys, names.index("seq"), len(shape))
        axes.append(Axis("distance", queries - axes[names.index("ctx")].labels))
    return axes


def _along(labels: np.ndarray, dimension: int, n_dimensions: int) -> np.ndarray:
    return labels.reshape([-1 if i == dimension else 1 for i in range(n_dimensions)])


def describe_indices(axis: Axis, chosen: np.ndarray, labels: np.ndarray) -> str:
    """Describe some of an axis's labels, both sorted; empty for none, for all, or without short words for them."""
    if not 0 < len(chosen) < len(labels):
        return ""
    if axis.noun == "distance":
        return _describe_distances(chosen, labels)
    noun, numbers = axis.noun, [int(label) for label in chosen]
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if _is_run(numbers):
        return _describe_run(f"{noun}s", numbers, int(labels[-1]))
    if period := _describe_period(f"{noun}s", chosen, labels):
        return period
    if len(numbers) <= N_LISTED:
        return f"{noun}s {join_words([str(number) for number in numbers])}"
    others = sorted({int(label) for label in labels} - set(numbers))
    if len(others) <= N_LISTED // 2:
        return f"{noun}s other than {join_words([str(number) for number in others])}"
    return ""


def join_words(words: Sequence[str]) -> str:
    """Join words: `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _is_run(numbers: Sequence[int]) -> bool:
    return all(after - before == 1 for before, after in pairwise(numbers))


def _describe_run(nouns: str, numbers: Sequence[int], last: int) -> str:
    if len(numbers) == 2:
        return f"{nouns} {numbers[0]} and {numbers[1]}"
    return f"{nouns} from {numbers[0]} on" if numbers[-1] == last else f"{nouns} {numbers[0]} to {numbers[-1]}"


def _describe_period(nouns: str, chosen: np.ndarray, labels: np.ndarray) -> str:
    """Describe labels with the same remainders, from the first chosen one on; empty if they have no period."""
    first = int(chosen[0])
    later = labels[labels >= first]
    is_chosen = np.isin(later, chosen)
    for period in range(2, len(later) // MIN_PERIODS + 1):
        if len(later) > period and np.array_equal(is_chosen[period:], is_chosen[:-period]):
            return _describe_remainders(nouns, period, sorted({int(label) % period for label in chosen}), first, labels)
    return ""


def _describe_remainders(nouns: str, period: int, remainders: list[int], first: int, labels: np.ndarray) -> str:
    is_late = bool((labels < first - period).any())  # a whole period before the first is right
    start = f" from {first} on" if is_late else ""
    if period == 2:
        return f"{'odd' if remainders[0] else 'even'} {nouns}{start}"
    if len(remainders) == 1:
        condition = f"k % {period} = {remainders[0]}"
    elif not _is_run(remainders):
        condition = f"k % {period} in {remainders}" if len(remainders) <= N_LISTED else ""
    elif remainders[0] == 0:
        condition = f"k % {period} < {remainders[-1] + 1}"
    elif remainders[-1] == period - 1:
        condition = f"k % {period} >= {remainders[0]}"
    else:
        condition = f"{remainders[0]} <= k % {period} <= {remainders[-1]}"
    return condition and f"{nouns} k with {condition}{start}"


def _describe_distances(chosen: np.ndarray, labels: np.ndarray) -> str:
    """Describe the distances of keys from their query."""
    numbers = [int(label) for label in chosen]
    if not _is_run(numbers):
        return ""
    if numbers == [0]:
        return "the query's own key"
    if len(numbers) == 1:
        return f"the key {numbers[0]} before the query" if numbers[0] > 0 else f"the key {-numbers[0]} after the query"
    if numbers[-1] == labels[-1]:
        return f"keys {numbers[0]} or more before the query" if numbers[0] > 0 else ""
    if numbers[-1] < 0:
        return "keys after the query"
    return f"keys up to {numbers[-1]} before the query" if numbers[0] <= 0 else ""
