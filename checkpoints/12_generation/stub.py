"""Lesson 12: the loop that writes. Here the model is given to you as a function, so this lesson needs Python.

Write `positions` and `generate`, save, and check them: llorch learn check 12
Then let your functions write: llorch run story --impl . "Once upon a time"
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from l10_argmax import argmax


def positions(n_before: int, n_new: int) -> np.ndarray:
    """Return the positions of a pass's new tokens in the text.

    Args:
        n_before: Tokens that the cache holds.
        n_new: Tokens of this pass: the prompt, then one at a time.

    Returns:
        Counted from 0, (n_new,), int64.
    """
    raise NotImplementedError


def generate(
    step: Callable[[Sequence[int]], np.ndarray], prompt: np.ndarray, max_tokens: int
) -> Iterator[int] | list[int]:
    """Continue a prompt by the likeliest token, again and again.

    Args:
        step: Runs new ids after all earlier ones (it has the cache) and returns the last row of logits,
            (vocab,).
        prompt: Token ids, (n,), int64.
        max_tokens: How many tokens to write.

    Returns:
        Their ids: yield each, or return a list of them. The caller stops at an end token.
    """
    raise NotImplementedError
