"""The numbers at the end of a reply: tokens that were read, cached and made, and their times."""

from llorch.apps.serve.engine import Work
from llorch.apps.serve.replies import timings, usage
from llorch.model.generate import Answer, IdsOnly, Job
from llorch.ops.sampling import SamplingSettings

N_PROMPT = 8


def answer(n_cached: int, n_made: int, joined: float, first: float, last: float) -> Work:
    """One answer to a prompt of `N_PROMPT` tokens; the seconds are those of the engine's clock."""
    job = Job([*range(N_PROMPT)], n_made, SamplingSettings(), frozenset())
    made = Answer(IdsOnly(), end_ids=frozenset(), max_tokens=n_made)
    return Work(job, made, lambda event: None, 0.0, joined, first, last, n_cached, n_made)


WORKS = answer(6, 5, 1.0, 2.0, 4.0), answer(0, 9, 1.5, 3.0, 5.0)


def test_a_prompt_of_two_answers_is_counted_once_with_the_most_tokens_that_were_cached():
    found = usage(WORKS, n_prompt=N_PROMPT)
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (8, 14, 22)
    assert found.prompt_tokens_details.cached_tokens == 6


def test_cached_tokens_are_not_read_and_the_first_token_of_an_answer_is_no_step():
    found = timings(WORKS)
    assert (found.cache_n, found.prompt_n, found.predicted_n) == (6, 10, 14)
    assert (found.prompt_ms, found.prompt_per_second) == (2000, 5)  # from the first that joined to the last first token
    assert (found.predicted_ms, found.predicted_per_second) == (2000, 6)
