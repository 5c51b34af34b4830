"""The tokens of one job, chosen from logits; and jobs with adapters of their own, beside each other."""

import math

import numpy as np
import pytest
import torch
from builders.random_adapters import random_adapter
from helpers.continuous import job, run_alone, run_together, some_ids, varied_jobs
from helpers.refusals import assert_tells

import llorch
from llorch.model.generate import Job, Sampled, log_probability, sample_ids
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.model import TorchModel
from llorch.pytorch.serving.batch import ContinuousBatch
from llorch.pytorch.serving.choosing import Sampler, next_tokens, top_of
from llorch.pytorch.serving.pages import PAGE

CPU = torch.device("cpu")
VOCAB = 50
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=1.0, seed=4),
    SamplingSettings(presence_penalty=2.0),
    SamplingSettings(temperature=1.3, frequency_penalty=0.9, repetition_penalty=1.3, top_p=0.9, seed=8),
]


class ListGuide:
    """A guide that allows the same tokens always."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.taken = ids, list[int]()

    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(VOCAB), self.ids)

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)


def make_sampler(settings: SamplingSettings, **job_settings) -> Sampler:
    return Sampler(Job([1, 2, 3], 30, settings, frozenset(), **job_settings), VOCAB, CPU)


def choose_token(sampler: Sampler, logits: torch.Tensor) -> Sampled:
    (made,) = next_tokens([sampler], logits.view(1, -1))
    assert isinstance(made, Sampled)
    return made


def random_logits(n: int) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


@pytest.mark.parametrize("settings", SETTINGS)
def test_sampled_tokens_equal_generate(settings: SamplingSettings):
    logits = random_logits(30)
    one, each = make_sampler(settings), iter(logits.numpy())
    expected = list(sample_ids(lambda new: next(each), [1, 2, 3], settings, max_tokens=30))
    actual = [choose_token(one, row) for row in logits]
    assert [sampled.id for sampled in actual] == [token_id for token_id, _ in expected]
    np.testing.assert_allclose([sampled.logprob for sampled in actual], [logprob for _, logprob in expected], rtol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_guide_restricts_the_tokens_and_receives_each_sampled_token(settings: SamplingSettings):
    guide = ListGuide(7, 31)
    one = make_sampler(settings, guide=guide)
    actual = [choose_token(one, row) for row in random_logits(20)]
    assert guide.taken == [sampled.id for sampled in actual]
    assert {*guide.taken} == {7, 31}
    for sampled, row in zip(actual, random_logits(20).numpy(), strict=True):
        assert sampled.logprob == pytest.approx(log_probability(row, sampled.id), abs=1e-12)


def test_rows_sampled_together_equal_rows_sampled_alone():
    guides = [None, ListGuide(3, 4), None, ListGuide(), ListGuide(5), None]
    settings = [*SETTINGS, SamplingSettings(), SamplingSettings(temperature=0.5, min_p=0.1, seed=2)]
    every = [make_sampler(how, guide=guide) for how, guide in zip(settings, guides, strict=True)]
    apart = [make_sampler(how, guide=guide) for how, guide in zip(settings, guides, strict=True)]
    for _ in range(10):
        logits = random_logits(6)
        together = next_tokens(every, logits)
        assert isinstance(together[3], ValueError)
        for at in (0, 1, 2, 4, 5):
            one, expected = together[at], choose_token(apart[at], logits[at])
            assert isinstance(one, Sampled)
            assert one.id == expected.id
            assert one.logprob == pytest.approx(expected.logprob, abs=1e-12)


def test_guide_without_allowed_tokens_is_an_error():
    (nothing,) = next_tokens([make_sampler(SamplingSettings(), guide=ListGuide())], random_logits(1))
    assert_tells(str(nothing), where="guide", expected=VOCAB, got="[False")


def test_non_finite_logits_are_reported_before_the_guide_advances():
    guide = ListGuide(7)
    logits = random_logits(1).index_fill(1, torch.tensor([3]), math.inf)
    assert math.isnan(choose_token(make_sampler(SamplingSettings(), guide=guide), logits).logprob)
    assert guide.taken == []


def test_the_likeliest_tokens_come_with_log_probabilities_before_any_filter():
    row = torch.full((1, VOCAB), -30.0)
    row[0, [9, 4, 30, 2]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    top = choose_token(make_sampler(SamplingSettings(presence_penalty=2.0), n_top=3, guide=ListGuide(40)), row).top
    assert [token_id for token_id, _ in top] == [4, 2, 9]  # of equal ones the lowest ids
    expected = [log_probability(row[0].numpy(), token_id) for token_id in (4, 2, 9)]
    np.testing.assert_allclose([logprob for _, logprob in top], expected, rtol=1e-12)
    assert len(top_of(row[0], VOCAB + 5)) == VOCAB
    assert choose_token(make_sampler(SamplingSettings()), row).top == ()


@pytest.fixture
def model() -> TorchModel:
    made = llorch.load_torch("micro-qwen3", mode="reproducible")
    for seed, name in enumerate(("one", "two")):
        made.add_adapter(name, random_adapter(made.config, seed=seed))
    return made


def make_batch(model: TorchModel, n_jobs: int = 4) -> ContinuousBatch:
    return ContinuousBatch(model, n_jobs=n_jobs, n_tokens=20 * PAGE, chunk=50)


@pytest.mark.nightly_cases("adapters0")
@pytest.mark.parametrize("adapters", [[None, "one", "two"], ["one"]])
def test_each_job_runs_through_its_own_adapter(model: TorchModel, adapters: list[str | None]):
    jobs = varied_jobs(model, adapters)
    expected = [run_alone(model, one) for one in jobs]
    assert run_together(make_batch(model), jobs, joining={3: 7}) == expected
    other = [run_alone(model, job(one.ids, one.max_tokens, one.settings)) for one in jobs]
    assert [made != base for made, base in zip(expected, other, strict=True)] == [
        one.adapter is not None for one in jobs
    ]


def test_pages_are_not_shared_between_adapters(model: TorchModel):
    batch, ids, found = make_batch(model), some_ids(model, 2 * PAGE), []
    for name in (None, "one", "two", "one", None, "two"):
        (made,) = run_together(batch, [job(ids, 1, adapter=name)])
        assert made == run_alone(model, job(ids, 1, adapter=name))
        ticket = batch.join(job(ids, 1, adapter=name))
        assert ticket is not None
        found.append(batch.n_cached(ticket))
        batch.leave(ticket)
    assert found == [PAGE] * 6
    before = batch.join(job(ids, 1, adapter="one"))
    assert before is not None
    model.remove_adapter("one")
    model.add_adapter("one", random_adapter(model.config, seed=9))
    ticket = batch.join(job(ids, 1, adapter="one"))
    assert ticket is not None
    assert (batch.n_cached(before), batch.n_cached(ticket)) == (PAGE, 0)


def test_running_jobs_keep_a_removed_or_replaced_adapter(model: TorchModel):
    jobs = [job([1, 2, at], 12, adapter=name) for at, name in enumerate(("one", "two", None, "one"))]
    expected, batch = [run_alone(model, one) for one in jobs], make_batch(model, 5)
    made = {ticket: [] for ticket in map(batch.join, jobs) if ticket is not None}
    for n_steps in range(60):
        if n_steps == 10:
            model.remove_adapter("one")
        if n_steps == 14:
            model.add_adapter("one", random_adapter(model.config, seed=9))
            jobs.append(job([1, 2, 0], 12, adapter="one"))
            expected.append(run_alone(model, jobs[-1]))
            ticket = batch.join(jobs[-1])
            assert ticket is not None
            made[ticket] = []
        for ticket, one in batch.step().items():
            assert isinstance(one, Sampled)
            made[ticket].append((one.id, one.logprob))
    assert list(made.values()) == expected
    assert expected[0] != expected[4]
