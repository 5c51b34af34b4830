"""Jobs with adapters of their own, beside each other, and adapters that come and go while they run."""

import pytest
from builders.random_adapters import random_adapter
from helpers.continuous import alone, job, some_ids, together, varied_jobs

import llorch
from llorch.model.generate import Sampled
from llorch.pytorch.model import TorchModel
from llorch.pytorch.serving.batch import ContinuousBatch
from llorch.pytorch.serving.pages import PAGE


@pytest.fixture
def model() -> TorchModel:
    made = llorch.load_torch("micro-qwen3", mode="reproducible")
    for seed, name in enumerate(("one", "two")):
        made.add_adapter(name, random_adapter(made.config, seed=seed))
    return made


def batch_of(model: TorchModel, n_jobs: int = 4) -> ContinuousBatch:
    return ContinuousBatch(model, n_jobs=n_jobs, n_tokens=20 * PAGE, chunk=50)


@pytest.mark.nightly_cases("adapters0")
@pytest.mark.parametrize("adapters", [[None, "one", "two"], ["one"]])
def test_each_job_runs_through_its_own_adapter(model: TorchModel, adapters: list[str | None]):
    jobs = varied_jobs(model, adapters)
    expected = [alone(model, one) for one in jobs]
    assert together(batch_of(model), jobs, joining={3: 7}) == expected
    other = [alone(model, job(one.ids, one.max_tokens, one.settings)) for one in jobs]
    assert [made != base for made, base in zip(expected, other, strict=True)] == [
        one.adapter is not None for one in jobs
    ]


def test_pages_of_an_adapter_mean_nothing_to_another(model: TorchModel):
    batch, ids, found = batch_of(model), some_ids(model, 2 * PAGE), []
    for name in (None, "one", "two", "one", None, "two"):
        (made,) = together(batch, [job(ids, 1, adapter=name)])
        assert made == alone(model, job(ids, 1, adapter=name))
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


def test_what_runs_goes_on_with_an_adapter_that_is_removed_or_replaced(model: TorchModel):
    jobs = [job([1, 2, at], 12, adapter=name) for at, name in enumerate(("one", "two", None, "one"))]
    expected, batch = [alone(model, one) for one in jobs], batch_of(model, 5)
    made = {ticket: [] for ticket in map(batch.join, jobs) if ticket is not None}
    for n_steps in range(60):
        if n_steps == 10:
            model.remove_adapter("one")
        if n_steps == 14:
            model.add_adapter("one", random_adapter(model.config, seed=9))
            jobs.append(job([1, 2, 0], 12, adapter="one"))
            expected.append(alone(model, jobs[-1]))
            ticket = batch.join(jobs[-1])
            assert ticket is not None
            made[ticket] = []
        for ticket, one in batch.step().items():
            assert isinstance(one, Sampled)
            made[ticket].append((one.id, one.logprob))
    assert list(made.values()) == expected
    assert expected[0] != expected[4]
