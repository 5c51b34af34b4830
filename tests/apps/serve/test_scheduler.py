"""Jobs that take turns on the NumPy path: each answer is the one that `generate` gives alone."""

from dataclasses import replace

import numpy as np
import pytest

from llorch.apps.serve.scheduler import Turns
from llorch.model.generate import GenerationBatch, Job, Sampled, Token
from llorch.model.model import PREFILL_CHUNK, Model, load
from llorch.ops.sampling import SamplingSettings

PROMPTS = ("Once upon a time", "The little fox", "A")
SETTINGS = (
    SamplingSettings(),
    SamplingSettings(temperature=1.2, top_p=0.9, seed=3),
    SamplingSettings(temperature=0.8, top_k=20, min_p=0.01, repetition_penalty=1.2, frequency_penalty=2.0, seed=4),
)


def job(model: Model, prompt: str, settings: SamplingSettings, max_tokens: int = 12) -> Job:
    return model.job(prompt, max_tokens=max_tokens, settings=settings, ignore_eos=True, adapter=None)


def solo(model: Model, job: Job) -> list[tuple[int, float]]:
    tokens: list[Token] = list(
        model.generate(job.ids, max_tokens=job.max_tokens, settings=job.settings, ignore_eos=True)
    )
    return [(token.id, token.logprob) for token in tokens]


def run(batch: GenerationBatch, jobs: list[Job], joins: list[int]) -> list[list[tuple[int, float]]]:
    """Let each job join at its step and leave when it is complete."""
    tickets: dict[int, int] = {}
    made: list[list[tuple[int, float]]] = [[] for _ in jobs]
    for step in range(200):
        for place, one in enumerate(jobs):
            if joins[place] == step:
                ticket = batch.join(one)
                assert ticket is not None
                tickets[ticket] = place
        for ticket, sampled in batch.step().items():
            assert isinstance(sampled, Sampled)
            place = tickets[ticket]
            made[place].append((sampled.id, sampled.logprob))
            if len(made[place]) == jobs[place].max_tokens:
                batch.leave(ticket)
        if all(len(ids) == one.max_tokens for ids, one in zip(made, jobs, strict=True)):
            return made
    raise AssertionError("not finished")


def test_answers_equal_generate_whatever_runs_in_the_batch(story: Model):
    jobs = [job(story, prompt, how) for prompt, how in zip(PROMPTS, SETTINGS, strict=True)]
    assert run(Turns(story, n_jobs=3), jobs, [0, 3, 7]) == [solo(story, one) for one in jobs]


def test_penalties_count_what_the_answer_has(story: Model):
    plain, penalised = (job(story, PROMPTS[0], SamplingSettings(frequency_penalty=p), 40) for p in (0.0, 2.0))
    answers = [run(Turns(story, n_jobs=1), [one], [0])[0] for one in (plain, penalised)]
    assert answers == [solo(story, plain), solo(story, penalised)]
    assert answers[0] != answers[1]


def test_a_long_prompt_is_read_in_stretches_between_which_others_go_on():
    model = load("micro-llama")
    long = Job((np.arange(PREFILL_CHUNK + 40) % 300 + 1).tolist(), 2, SamplingSettings(), frozenset())
    short = Job((3, 4, 5), 6, SamplingSettings(), frozenset())
    batch = Turns(model, n_jobs=2)
    first, second = batch.join(short), batch.join(long)
    made = [batch.step() for _ in range(5)]
    assert [list(one) for one in made] == [[first], [first], [], [first], [second]]
    batch.leave(first)  # type: ignore[arg-type]
    batch.leave(second)  # type: ignore[arg-type]
    assert run(batch, [long, short], [0, 0]) == [solo(model, long), solo(model, short)]


def test_batch_is_limited_and_a_finished_job_frees_its_place(story: Model):
    batch, one = Turns(story, n_jobs=2), job(story, "A", SamplingSettings())
    tickets = [batch.join(one), batch.join(one), batch.join(one)]
    assert tickets == [0, 1, None]
    batch.leave(0)
    assert batch.join(one) == 2


def test_the_likeliest_tokens_come_with_it_and_at_temperature_0_the_first_is_the_one(story: Model):
    batch = Turns(story, n_jobs=1)
    ticket = batch.join(replace(job(story, "Once upon", SamplingSettings()), n_top=3))
    assert ticket is not None
    sampled = batch.step()[ticket]
    assert isinstance(sampled, Sampled)
    assert sampled.top[0] == (sampled.id, sampled.logprob)
    assert len(sampled.top) == 3
    logits = story.forward(story.tokenizer.encode("Once upon"))[-1].astype(np.float64)
    wanted = np.sort(logits - np.log(np.exp(logits).sum()))[::-1][:3]
    np.testing.assert_allclose([logprob for _, logprob in sampled.top], wanted, rtol=1e-5)


class OnlyOdd:
    """Allows odd ids; `broken` after so many."""

    def __init__(self, vocab_size: int, last: int = 99) -> None:
        self.taken: list[int] = []
        self._allowed, self._last = np.arange(vocab_size) % 2 == 1, last

    def allowed(self) -> np.ndarray:
        if len(self.taken) == self._last:
            raise RuntimeError("the guide is broken")
        return self._allowed

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_guide_allows_tokens_and_receives_the_chosen_one(story: Model, temperature: float):
    guide = OnlyOdd(story.config.vocab_size)
    wanted = replace(job(story, "Once", SamplingSettings(temperature=temperature)), guide=guide)
    (made,) = run(Turns(story, n_jobs=1), [wanted], [0])
    assert [token_id for token_id, _ in made] == guide.taken
    assert all(token_id % 2 for token_id in guide.taken)


def test_error_of_one_job_is_reported_to_that_job(story: Model):
    batch = Turns(story, n_jobs=2)
    healthy = job(story, "The little fox", SamplingSettings())
    broken = batch.join(replace(healthy, guide=OnlyOdd(story.config.vocab_size, last=1)))
    other = batch.join(healthy)
    assert (broken, other) == (0, 1)
    steps = [batch.step() for _ in range(3)]  # a prompt, answers, a prompt, in which nobody waits for the other
    steps.append(batch.step())
    assert [list(one) for one in steps] == [[0], [0], [1], [0, 1]]
    assert str(steps[1][0]) == "the guide is broken"
    batch.leave(0)
    steps += [batch.step() for _ in range(10)]
    actual = [(one[1].id, one[1].logprob) for one in steps if isinstance(one.get(1), Sampled)]  # type: ignore[union-attr]
    assert actual == solo(story, healthy)
