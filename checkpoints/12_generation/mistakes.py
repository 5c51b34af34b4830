"""Wrong loops, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

from collections.abc import Callable, Iterator

import numpy as np


def begins_twice(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    new = [prompt[0], *prompt]
    for _ in range(max_tokens):
        token = int(np.argmax(step(new)))
        yield token
        new = [token]


def text_again(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    text = [*prompt]
    for _ in range(max_tokens):
        text.append(int(np.argmax(step(text))))
        yield text[-1]


WRONG = {
    "generate": {
        "generation-first-token-twice": begins_twice,
        "generation-text-fed-again": text_again,
    },
}
UNTYPED = {
    "generation-past-forgotten": "the cache is behind `step`, and `append` of 03 cannot forget: the shape of what it "
    "returns is looked at"
}
