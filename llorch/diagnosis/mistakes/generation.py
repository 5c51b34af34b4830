"""Known mistakes in the generation loop: no array of one pass reveals them; `mistake` explains the fields."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import instead
from llorch.files import Weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache

Step = Callable[[Any], np.ndarray]  # runs new ids after the cached ones, returns the last row of logits
Loop = Callable[[Step, np.ndarray, int], Iterator[int]]


@dataclass(frozen=True)
class GenerationInputs:
    """Inputs of a greedy generation loop."""

    weights: Weights
    prompt: tuple[int, ...]
    n_tokens: int

    def empty_cache(self) -> KVCache:
        """Return a new empty cache."""
        return KVCache.of(self.weights)

    def best(self, ids: tuple[int, ...], cache: KVCache) -> int:
        """Run new ids and return the greedy token after them."""
        return int(np.argmax(forward(np.asarray(ids), self.weights, cache, last_only=True)[0]))

    def loop(self, new: tuple[int, ...], cache: KVCache) -> np.ndarray:
        """Run the right greedy loop: run the new ids, select the most likely token, run that token next."""
        out: list[int] = []
        for _ in range(self.n_tokens):
            out.append(self.best(new, cache))
            new = (out[-1],)
        return np.asarray(out, np.int64)


def right(g: GenerationInputs) -> np.ndarray:
    """Return the greedy continuation of the prompt."""
    return g.loop(g.prompt, g.empty_cache())


def last_prompt_token_twice(right: Loop) -> Loop:
    """Start the loop by running the prompt's last token again."""

    def wrong(step: Step, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
        step(prompt)
        yield from right(step, prompt[-1:], max_tokens)

    return wrong


def first_token_twice(right: Loop) -> Loop:
    """Repeat the first token of the prompt."""
    return lambda step, prompt, max_tokens: right(step, np.concatenate([prompt[:1], prompt]), max_tokens)


def warm_up_left(right: Loop) -> Loop:
    """Leave two tokens of a warm-up run in the cache."""

    def wrong(step: Step, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
        step(prompt[:2])
        yield from right(step, prompt, max_tokens)

    return wrong


def past_forgotten(g: GenerationInputs, step: str) -> np.ndarray:
    """Run every step from an empty cache."""
    out: list[int] = []
    new = g.prompt
    for _ in range(g.n_tokens):
        out.append(g.best(new, g.empty_cache()))
        new = (out[-1],)
    return np.asarray(out, np.int64)


def text_again(g: GenerationInputs, step: str) -> np.ndarray:
    """Run prompt and output again at every step, appended to the cache, until the context is full."""
    cache, text, n_context = g.empty_cache(), list(g.prompt), g.weights.config.max_position_embeddings
    while len(text) < len(g.prompt) + g.n_tokens and cache.length + len(text) <= n_context:
        text.append(g.best(tuple(text), cache))
    return np.asarray(text[len(g.prompt) :], np.int64)


def not_fed_back(step: Step, prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    """Run the prompt's last token at every step."""
    row = step(prompt)
    for n_remaining in reversed(range(max_tokens)):
        yield int(np.argmax(row))
        if n_remaining:
            row = step(prompt[-1:])


def positions_restart(n_before: int, n_new: int) -> np.ndarray:
    """Derive positions from a counter of passes: they start at 1 after the prompt, whatever its length."""
    return np.arange(n_new) + (1 if n_before else 0)


# LOOP: value of `part`, the function that `wrong` replaces, see `in_stage`; else `wrong` returns the generated ids.
STEP, CASES, LOOP = ("generation",), ("near",), "generate"

GENERATION: tuple[Mistake[GenerationInputs], ...] = (
    Mistake(
        name="generation-last-prompt-token-twice", stages=STEP, cases=CASES, part=LOOP, wrong=last_prompt_token_twice,
        diagnosis="The prompt's last token was run again to get the first logits; the prompt's own pass gave them.",
    ),
    Mistake(
        name="generation-first-token-twice", stages=STEP, cases=CASES, part=LOOP, wrong=first_token_twice,
        diagnosis="The prompt began with its first token twice (BOS added by template and tokenizer).",
    ),
    Mistake(
        name="generation-warm-up-left", stages=STEP, cases=CASES, part=LOOP, wrong=warm_up_left,
        diagnosis="Tokens of an earlier run were in the cache; empty it for every new sequence.",
    ),
    Mistake(
        name="generation-past-forgotten", stages=STEP, cases=CASES, wrong=past_forgotten,
        diagnosis="Every step saw only its newest token; the cache has to be kept between steps.",
    ),
    Mistake(
        name="generation-text-fed-again", stages=STEP, cases=CASES, wrong=text_again,
        diagnosis="The whole text was run at every step; the cache holds the earlier tokens, run the new token alone.",
    ),
    Mistake(
        name="generation-token-not-fed-back", stages=STEP, cases=CASES, part=LOOP, wrong=instead(not_fed_back),
        diagnosis="The same token was run at every step; the sampled token is the next input.",
    ),
    Mistake(
        name="generation-positions-count-steps", stages=STEP, cases=CASES, part="positions",
        wrong=instead(positions_restart),
        diagnosis="The first token after the prompt was rotated at position 1; its position is the prompt's length.",
    ),
)  # fmt: skip
