"""What every reply ends with: how many tokens there were, and how long they took."""

from collections.abc import Sequence

from llorch.apps.serve.replies import CachedTokens, Finish, Timings, Usage
from llorch.apps.serve.work import Work


def usage(works: Sequence[Work], *, n_prompt: int) -> Usage:
    """Count the tokens of all answers to a request; each prompt of `n_prompt` tokens is counted once."""
    made, cached = sum(work.n_made for work in works), max((work.n_cached for work in works), default=0)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=made,
        total_tokens=n_prompt + made,
        prompt_tokens_details=CachedTokens(cached_tokens=min(cached, n_prompt)),
    )


def timings(works: Sequence[Work]) -> Timings:
    """Measure from the first answer that began to the last that ended."""
    began = min(work.joined or work.submitted for work in works)
    first = max(work.first or began for work in works)
    last = max(work.last or first for work in works)
    n_read, n_made = sum(len(work.job.ids) - work.n_cached for work in works), sum(work.n_made for work in works)
    return Timings(
        cache_n=sum(work.n_cached for work in works),
        prompt_n=n_read,
        prompt_ms=1e3 * (first - began),
        prompt_per_second=_rate(n_read, first - began),
        predicted_n=n_made,
        predicted_ms=1e3 * (last - first),
        predicted_per_second=_rate(n_made - len(works), last - first),
    )


def finish_reason(finish: str | None) -> Finish | None:
    """Translate the end of an answer to OpenAI's words: an end token is a stop."""
    return "length" if finish == "length" else None if finish is None else "stop"


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n > 0 and seconds > 0 else 0.0
