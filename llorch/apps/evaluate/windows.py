"""A text in windows, and models that run over them in step, so that no more than some rows of logits exist at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llorch.apps.evaluate.scores import PairScores, PerToken, compare_rows, losses
from llorch.files.tokenizer import Tokenizer
from llorch.model.cache import KVCache
from llorch.model.model import Model
from llorch.runtime.errors import UserError

CONTEXT = 512  # tokens of a window, unless the model has fewer or the user says otherwise
MIN_CONTEXT = 3  # one token to read, one to predict from, one to score
_LOGITS = 1 << 24  # logits of one model at a time, 64 MB
_REMEDY = "compare a model with a quantised copy of itself"


@dataclass(frozen=True)
class Windows:
    """A tokenized text, cut; iterate to get the ids of each window."""

    ids: np.ndarray  # of the whole text, its beginning token included
    beginning: int | None  # takes the place of the first id of each window, where the vocabulary has one
    context: int  # tokens per window
    count: int  # windows that are used

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, self.count * self.context, self.context):
            window = self.ids[start : start + self.context].copy()
            if self.beginning is not None:
                window[0] = self.beginning
            yield window


def cut_text(models: Sequence[Model], text: str, *, context: int | None = None, limit: int | None = None) -> Windows:
    """Tokenize a text and cut it into windows, once for all models, which must read it as the same ids.

    Windows have 512 tokens by default, fewer if the models cannot hold as many. There are at most `limit` windows.
    """
    _require_same_size(models)
    context = _checked_context(models, context)
    ids, beginning = text_ids(models[0].tokenizer, text)
    for other in models[1:]:
        _require_same_ids(models[0], ids, other, text_ids(other.tokenizer, text)[0])
    if len(ids) < context:
        raise UserError(
            f"text: one window needs {context} tokens, got {len(ids)}; give a longer text or a smaller context"
        )
    n_windows = len(ids) // context
    return Windows(ids, beginning, context, n_windows if limit is None else min(limit, n_windows))


def text_ids(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, int | None]:
    """Encode a text that goes on, without the end token that some vocabularies add; and the beginning token, if any."""
    special = tokenizer.encode("")
    beginning = special[0] if special and special[0] == tokenizer.bos_token_id else None
    ids = tokenizer.encode(text, add_special=False)
    return np.array([*([] if beginning is None else [beginning]), *ids], np.int64), beginning


def score(model: Model, windows: Windows) -> Iterator[PerToken]:
    """Yield the losses of each window's scored tokens, in nats; raise if logits are not finite."""
    for window in windows:
        loss = _score(model, window)
        _require_finite(model, loss)
        yield loss


def score_pair(reference: Model, model: Model, windows: Windows) -> Iterator[PairScores]:
    """Score two models on a text, in step."""
    for window in windows:
        scores = _score_pair(reference, model, window)
        _require_finite(reference, scores.reference_loss)
        _require_finite(model, scores.loss)
        yield scores


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused after the window
def _score(model: Model, window: np.ndarray) -> PerToken:
    """Return the losses in nats of a window's second half."""
    return np.concatenate([losses(logits, targets) for targets, [logits] in _in_step([model], window)])


@np.errstate(over="ignore", invalid="ignore")
def _score_pair(reference: Model, model: Model, window: np.ndarray) -> PairScores:
    """Compare two models on the tokens of a window's second half."""
    steps = _in_step([reference, model], window)
    return PairScores.join([compare_rows(expected, actual, targets) for targets, [expected, actual] in steps])


def _in_step(models: Sequence[Model], window: np.ndarray) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield some ids to be predicted and the logits that each model predicts them from, until the window ends."""
    middle, last = len(window) // 2, len(window) - 1
    caches = [KVCache.of(model.weights) for model in models]
    for model, cache in zip(models, caches, strict=True):
        model.forward(window[:middle], cache=cache, last_only=True)
    step = max(1, _LOGITS // models[0].config.vocab_size)
    for start in range(middle, last, step):
        end = min(start + step, last)
        logits = [m.forward(window[start:end], cache=cache) for m, cache in zip(models, caches, strict=True)]
        yield window[start + 1 : end + 1], logits


def _checked_context(models: Sequence[Model], context: int | None) -> int:
    smallest = min(models, key=lambda model: model.config.max_position_embeddings)
    most = smallest.config.max_position_embeddings
    context = min(CONTEXT, most) if context is None else context
    if not MIN_CONTEXT <= context <= most:
        raise UserError(f"context: {smallest.name} can have {MIN_CONTEXT} to {most} tokens, got {context}")
    return context


def _require_same_size(models: Sequence[Model]) -> None:
    sizes = {model.config.vocab_size for model in models}
    if len(sizes) > 1:
        listed = ", ".join(f"{model.name} has {model.config.vocab_size}" for model in models)
        raise UserError(f"vocabularies: expected vocabularies of equal size, but {listed}; {_REMEDY}")


def _require_same_ids(reference: Model, ids: np.ndarray, model: Model, others: np.ndarray) -> None:
    if np.array_equal(ids, others):
        return
    both = min(len(ids), len(others))
    differing = np.flatnonzero(ids[:both] != others[:both])
    at = int(differing[0]) if len(differing) else both
    found = [str(int(row[at])) if at < len(row) else "the end" for row in (ids, others)]
    where = f"token {at} of the text is {found[0]} for {reference.name} and {found[1]} for {model.name}"
    raise UserError(f"tokenizers: expected equal ids, but {where}; {_REMEDY}")


def _require_finite(model: Model, loss: np.ndarray) -> None:
    if not np.isfinite(loss).all():
        raise UserError(
            f"{model.name}: expected finite logits, got NaN or infinity; get the file again, its weights are damaged"
        )
