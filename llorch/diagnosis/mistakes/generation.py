"""Mistakes of checkpoint 12: the loop around the model. The tensors of one pass cannot show them, the text can."""

from dataclasses import dataclass

import numpy as np

from llorch.cache import KVCache
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.families import forward
from llorch.files import Weights


@dataclass(frozen=True)
class GenerationInputs:
    """All that a greedy loop reads."""

    weights: Weights
    prompt: tuple[int, ...]
    n_tokens: int

    def empty_cache(self) -> KVCache:
        """Return a new empty cache."""
        return KVCache(self.weights.config, self.weights.cache_dtype, rounding=self.weights.cache_rounding)

    def best(self, ids: tuple[int, ...], cache: KVCache) -> int:
        """Run some new ids and return the greedy token after them."""
        return int(np.argmax(forward(np.asarray(ids), self.weights, cache, last_only=True)[0]))

    def loop(self, new: tuple[int, ...], cache: KVCache) -> np.ndarray:
        """Run the right greedy loop: run the new ids, take the best token, run that token next."""
        out: list[int] = []
        for _ in range(self.n_tokens):
            out.append(self.best(new, cache))
            new = (out[-1],)
        return np.asarray(out, np.int64)


class RestartingCache(KVCache):
    """Gives the tokens after the prompt positions from 1 on, whatever the length of the prompt."""

    def next_positions(self, n_tokens: int) -> np.ndarray:
        """Derive positions from a counter of passes."""
        return np.arange(n_tokens) + (1 if self.length else 0)


def right(g: GenerationInputs) -> np.ndarray:
    """Return the greedy continuation of the prompt."""
    return g.loop(g.prompt, g.empty_cache())


def last_prompt_token_twice(g: GenerationInputs, step: str) -> np.ndarray:
    """Start the loop by running the prompt's last token again."""
    cache = g.empty_cache()
    g.best(g.prompt, cache)
    return g.loop(g.prompt[-1:], cache)


def warm_up_left(g: GenerationInputs, step: str) -> np.ndarray:
    """Leave two tokens of a warm-up in the cache."""
    cache = g.empty_cache()
    g.best(g.prompt[:2], cache)
    return g.loop(g.prompt, cache)


def past_forgotten(g: GenerationInputs, step: str) -> np.ndarray:
    """Run every step from an empty cache."""
    out: list[int] = []
    new = g.prompt
    for _ in range(g.n_tokens):
        out.append(g.best(new, g.empty_cache()))
        new = (out[-1],)
    return np.asarray(out, np.int64)


def text_again(g: GenerationInputs, step: str) -> np.ndarray:
    """Append prompt and output so far to the cache at every step, until the context is full."""
    cache, text, n_context = g.empty_cache(), list(g.prompt), g.weights.config.max_position_embeddings
    while len(text) < len(g.prompt) + g.n_tokens and cache.length + len(text) <= n_context:
        text.append(g.best(tuple(text), cache))
    return np.asarray(text[len(g.prompt) :], np.int64)


def not_fed_back(g: GenerationInputs, step: str) -> np.ndarray:
    """Run the prompt's last token at every step."""
    cache = g.empty_cache()
    first = g.best(g.prompt, cache)
    later = [g.best(g.prompt[-1:], cache) for _ in range(g.n_tokens - 1)]
    return np.asarray([first, *later], np.int64)


STEP, CASES = ("generation",), ("near",)

GENERATION: tuple[Mistake[GenerationInputs], ...] = (
    Mistake(
        name="generation-last-prompt-token-twice", stages=STEP, cases=CASES, wrong=last_prompt_token_twice,
        diagnosis="The prompt's last token was run again to get the first logits; the prompt's own pass gave them.",
    ),
    Mistake(
        name="generation-first-token-twice", stages=STEP, cases=CASES,
        wrong=lambda g, _: g.loop(g.prompt[:1] + g.prompt, g.empty_cache()),
        diagnosis="The prompt began with its first token twice (BOS added by template and tokenizer).",
    ),
    Mistake(
        name="generation-warm-up-left", stages=STEP, cases=CASES, wrong=warm_up_left,
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
        name="generation-token-not-fed-back", stages=STEP, cases=CASES, wrong=not_fed_back,
        diagnosis="The same token was run at every step; the sampled token is the next input.",
    ),
    Mistake(
        name="generation-positions-count-steps", stages=STEP, cases=CASES,
        wrong=lambda g, _: g.loop(g.prompt, RestartingCache(g.weights.config, g.weights.dtype)),
        diagnosis="The first token after the prompt was rotated at position 1; its position is the prompt's length.",
    ),
)  # fmt: skip
