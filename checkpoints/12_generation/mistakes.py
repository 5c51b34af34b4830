"""Wrong loops, by the name of the known mistake. Each must fail under its name."""

from collections.abc import Callable, Iterator

import numpy as np


def last_token_twice(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    step(prompt)
    token = int(prompt[-1])
    for _ in range(max_tokens):
        token = int(np.argmax(step([token])))
        yield token


def begins_twice(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    new = [prompt[0], *prompt]
    for _ in range(max_tokens):
        token = int(np.argmax(step(new)))
        yield token
        new = [token]


def warmed_up(step: Callable, prompt: np.ndarray, max_tokens: int) -> list[int]:
    step(prompt[:2])  # so that the first real pass is fast
    out: list[int] = []
    new = prompt
    while len(out) < max_tokens:
        out.append(int(np.argmax(step(new))))
        new = out[-1:]
    return out


def never_fed_back(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    row = step(prompt)
    for _ in range(max_tokens):
        yield int(np.argmax(row))
        row = step(prompt[-1:])


def text_again(step: Callable, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    text = [*prompt]
    for _ in range(max_tokens):
        text.append(int(np.argmax(step(text))))
        yield text[-1]


def steps_counted(n_before: int, n_new: int) -> np.ndarray:
    return np.arange(n_new) if n_before == 0 else np.arange(1, 1 + n_new)


WRONG = {
    "positions": {"generation-positions-count-steps": steps_counted},
    "generate": {
        "generation-last-prompt-token-twice": last_token_twice,
        "generation-first-token-twice": begins_twice,
        "generation-warm-up-left": warmed_up,
        "generation-text-fed-again": text_again,
        "generation-token-not-fed-back": never_fed_back,
    },
}
UNTYPED = {
    "generation-past-forgotten": "the cache is behind `step`, and `append` of 03 cannot forget: the shape of what it "
    "returns is looked at"
}
