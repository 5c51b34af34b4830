"""Windows of a text, and the scores of models on them; models run in chunks, so that few logits exist at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.apps.evaluate.scores import PairScores, PerToken, compare_rows, losses
from llorch.files.tokenizer import Tokenizer
from llorch.model.cache import KVCache
from llorch.model.model import Model
from llorch.runtime.errors import UserError

CONTEXT = 512  # default tokens per window, if the model has as many
MIN_CONTEXT = 3  # tokens: one of prefill, one to predict from, one to score
_MAX_LOGITS = 1 << 24  # logits per model and chunk, 64 MB in float32
_REMEDY = "compare a model with a quantised copy of itself"


@dataclass(frozen=True)
class Windows:
    """A tokenized text cut into windows; iteration yields the token ids of each window."""

    ids: np.ndarray  # token ids of the whole text, with BOS if the vocabulary adds it
    bos_id: int | None  # replaces the first id of each window; None if the vocabulary adds no BOS
    context: int  # tokens per window
    count: int  # number of windows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, self.count * self.context, self.context):
            window = self.ids[start : start + self.context].copy()
            if self.bos_id is not None:
                window[0] = self.bos_id
            yield window


def cut_text(models: Sequence[Model], text: str, *, context: int | None = None, limit: int | None = None) -> Windows:
    """Tokenize a text and cut it into windows; raise UserError unless all models have the same token ids for it.

    Windows have 512 tokens by default, or the models' context if it is shorter. There are at most `limit` windows.
    """
    _require_same_size(models)
    context = _choose_context(models, context)
    ids, bos_id = text_ids(models[0].tokenizer, text)
    for model in models[1:]:
        _require_same_ids(models[0], ids, model, text_ids(model.tokenizer, text)[0])
    if len(ids) < context:
        raise UserError(
            f"text: one window needs {context} tokens, got {len(ids)}; give a longer text or a smaller context"
        )
    n_windows = len(ids) // context
    return Windows(ids, bos_id, context, n_windows if limit is None else min(limit, n_windows))


def text_ids(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, int | None]:
    """Encode with BOS if the vocabulary adds it, without EOS; return also the BOS id, else None."""
    special_ids = tokenizer.encode("")
    bos_id = special_ids[0] if special_ids and special_ids[0] == tokenizer.bos_token_id else None
    ids = tokenizer.encode(text, add_special=False)
    return np.array([*([] if bos_id is None else [bos_id]), *ids], np.int64), bos_id


def score(model: Model, windows: Windows) -> Iterator[PerToken]:
    """Yield the losses of each window's scored tokens, in nats; raise UserError if logits are not finite."""
    for window in windows:
        loss = _score(model, window)
        _require_finite(model, loss)
        yield loss


def score_pair(reference: Model, model: Model, windows: Windows) -> Iterator[PairScores]:
    """Yield the scores of two models on each window; raise UserError if logits are not finite."""
    for window in windows:
        scores = _score_pair(reference, model, window)
        _require_finite(reference, scores.reference_loss)
        _require_finite(model, scores.loss)
        yield scores


@np.errstate(over="ignore", invalid="ignore")  # `_require_finite` reports NaN and infinity
def _score(model: Model, window: np.ndarray) -> PerToken:
    """Return the losses in nats of a window's second half."""
    return np.concatenate([losses(logits, targets) for targets, [logits] in _second_half_logits([model], window)])


@np.errstate(over="ignore", invalid="ignore")
def _score_pair(reference: Model, model: Model, window: np.ndarray) -> PairScores:
    """Compare two models on the tokens of a window's second half."""
    chunks = _second_half_logits([reference, model], window)
    return PairScores.join([compare_rows(expected, actual, targets) for targets, [expected, actual] in chunks])


def _second_half_logits(models: Sequence[Model], window: np.ndarray) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Prefill the first half, then yield (next tokens, logits of each model) in chunks of the second half."""
    middle, last = len(window) // 2, len(window) - 1
    caches = [KVCache.of(model.weights) for model in models]
    for model, cache in zip(models, caches, strict=True):
        model.forward(window[:middle], cache=cache, last_only=True)
    chunk_size = max(1, _MAX_LOGITS // models[0].config.vocab_size)
    for start in range(middle, last, chunk_size):
        end = min(start + chunk_size, last)
        logits = [model.forward(window[start:end], cache=cache) for model, cache in zip(models, caches, strict=True)]
        yield window[start + 1 : end + 1], logits


def _choose_context(models: Sequence[Model], context: int | None) -> int:
    smallest = min(models, key=lambda model: model.config.max_position_embeddings)
    max_context = smallest.config.max_position_embeddings
    context = min(CONTEXT, max_context) if context is None else context
    if not MIN_CONTEXT <= context <= max_context:
        raise UserError(f"context: {smallest.name} can have {MIN_CONTEXT} to {max_context} tokens, got {context}")
    return context


def _require_same_size(models: Sequence[Model]) -> None:
    sizes = {model.config.vocab_size for model in models}
    if len(sizes) > 1:
        listed = ", ".join(f"{model.name} has {model.config.vocab_size}" for model in models)
        raise UserError(f"vocabularies: expected vocabularies of equal size, but {listed}; {_REMEDY}")


def _require_same_ids(reference: Model, ids: np.ndarray, model: Model, model_ids: np.ndarray) -> None:
    if np.array_equal(ids, model_ids):
        return
    n_common = min(len(ids), len(model_ids))
    differing = np.flatnonzero(ids[:n_common] != model_ids[:n_common])
    index = int(differing[0]) if len(differing) else n_common
    tokens = [str(int(row[index])) if index < len(row) else "the end" for row in (ids, model_ids)]
    difference = f"token {index} of the text is {tokens[0]} for {reference.name} and {tokens[1]} for {model.name}"
    raise UserError(f"tokenizers: expected equal ids, but {difference}; {_REMEDY}")


def _require_finite(model: Model, loss: np.ndarray) -> None:
    if not np.isfinite(loss).all():
        raise UserError(
            f"{model.name}: expected finite logits, got NaN or infinity; get the file again, its weights are damaged"
        )
