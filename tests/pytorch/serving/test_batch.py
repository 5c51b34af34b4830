"""Jobs that join and leave while others run: each gets what it would get alone."""

import math

import numpy as np
import pytest
import torch
from helpers.continuous import VARIED, Made, job, n_free, run_alone, run_together, some_ids, varied_jobs
from helpers.refusals import refuses

import llorch
from llorch.model.generate import GenerationBatch, Sampled
from llorch.pytorch.model import TorchModel
from llorch.pytorch.serving.batch import ContinuousBatch
from llorch.pytorch.serving.pages import PAGE
from llorch.runtime.errors import NonFiniteRun

FAMILIES = ("micro-llama", "micro-qwen3", "micro-mistral", "micro-llama4", "micro-qwen3-moe", "micro-qwen3.5")
HYBRID = "micro-qwen3.5"
JOINING = {2: 4, 4: 6, 5: 12}  # some of the jobs not before these steps


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return llorch.load_torch("micro-qwen3", mode="reproducible")


def make_batch(model: TorchModel, n_jobs: int = 3, n_tokens: int = 12 * PAGE, chunk: int = 50) -> ContinuousBatch:
    return ContinuousBatch(model, n_jobs=n_jobs, n_tokens=n_tokens, chunk=chunk)


@pytest.mark.slow_cases(but=["micro-llama", "micro-qwen3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_reproducible_answer_has_the_same_bits_whatever_jobs_join_and_leave(name: str):
    model = llorch.load_torch(name, mode="reproducible")
    jobs, batch = varied_jobs(model), make_batch(model)
    made = run_together(batch, jobs, joining=JOINING)
    assert [len({*map(str, answer)}) > 1 for answer in made] == [True] * len(jobs)
    assert made == [run_alone(model, one) for one in jobs]
    assert n_free(batch) == 12


@pytest.mark.parametrize("name", ["micro-llama", "micro-mistral", HYBRID])
def test_fast_answer_is_close_to_the_reproducible_one(name: str):
    model = llorch.load_torch(name)
    jobs = varied_jobs(model)
    for actual, expected in zip(
        run_together(make_batch(model), jobs, joining=JOINING), (run_alone(model, j) for j in jobs), strict=True
    ):
        assert [token_id for token_id, _ in actual] == [token_id for token_id, _ in expected]
        np.testing.assert_allclose([p for _, p in actual], [p for _, p in expected], rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_answers_do_not_depend_on_chunk_size_bit_for_bit(model: TorchModel, chunk: int):
    jobs = varied_jobs(model)[:3]
    assert run_together(make_batch(model, chunk=chunk), jobs) == [run_alone(model, one) for one in jobs]


def count_cached_tokens(batch: ContinuousBatch, prompts: list[list[int]]) -> list[int]:
    """Tokens that each prompt had not to compute, one after the other."""
    found = []
    for ids in prompts:
        ticket = join_job(batch, ids)
        while not batch.step():
            pass
        found.append(batch.n_cached(ticket))
        batch.leave(ticket)
    return found


def join_job(batch: GenerationBatch, ids: list[int], n: int = 5, **settings) -> int:
    ticket = batch.join(job(ids, n, **settings))
    assert ticket is not None
    return ticket


def test_shared_prefix_pages_are_not_recomputed(model: TorchModel):
    ids = some_ids(model, 3 * PAGE)
    prompts = [ids, ids, [*ids, 1], ids[: 2 * PAGE], ids[: 2 * PAGE - 1], ids[:PAGE] + ids, [ids[0] ^ 1, *ids[1:]]]
    assert count_cached_tokens(make_batch(model), prompts) == [n * PAGE for n in (0, 2, 3, 1, 1, 1, 0)]


@pytest.mark.parametrize(("chunk", "n_cached"), [(PAGE - 1, 0), (PAGE, PAGE), (PAGE + 1, PAGE), (2 * PAGE - 1, PAGE)])
def test_page_is_shared_once_all_its_tokens_are_cached(model: TorchModel, chunk: int, n_cached: int):
    batch, ids = make_batch(model, chunk=chunk), some_ids(model, 3 * PAGE)
    left = join_job(batch, ids)
    assert not batch.step()  # one stretch of the prompt
    batch.leave(left)
    after = job(ids, 4)
    ticket = batch.join(after)
    assert ticket is not None
    assert batch.n_cached(ticket) == n_cached
    batch.leave(ticket)
    assert run_together(batch, [after]) == [run_alone(model, after)]


def test_an_answer_can_be_a_prefix_too(model: TorchModel):
    batch, ids = make_batch(model), some_ids(model, PAGE - 3)
    (answer,) = run_together(batch, [job(ids, 2 * PAGE)])
    whole = ids + [token_id for token_id, _ in answer]
    after = job([*whole, 5], 6)
    assert count_cached_tokens(batch, [[*whole, 5], [*whole[: 2 * PAGE], 5]]) == [2 * PAGE, 2 * PAGE]
    assert run_together(batch, [after]) == [run_alone(model, after)]


def test_simultaneous_jobs_share_the_prefix_of_the_first(model: TorchModel):
    batch, ids = make_batch(model), some_ids(model, 2 * PAGE)
    jobs = [job([*ids, at, at], 8, VARIED[at]) for at in range(3)]
    made: dict[int, Made] = {ticket: [] for ticket in map(batch.join, jobs) if ticket is not None}
    while any(len(answer) < 8 for answer in made.values()):
        for ticket, one in batch.step().items():
            assert isinstance(one, Sampled)
            made[ticket].append((one.id, one.logprob))
    assert [batch.n_cached(ticket) for ticket in made] == [0, 2 * PAGE, 2 * PAGE]
    assert list(made.values()) == [run_alone(model, one) for one in jobs]


def test_recurrent_states_are_not_shared():
    model = llorch.load_torch(HYBRID)
    ids = some_ids(model, 2 * PAGE)
    assert count_cached_tokens(make_batch(model), [ids, ids]) == [0, 0]


def test_least_recently_used_pages_are_evicted(model: TorchModel):
    batch = make_batch(model, n_tokens=4 * PAGE)
    first, second, third = (some_ids(model, 2 * PAGE, seed) for seed in range(3))
    assert count_cached_tokens(batch, [first, second, first, third, first, second]) == [0, 0, PAGE, 0, PAGE, 0]
    assert n_free(batch) == 4


@pytest.mark.nightly_cases("micro-qwen3.5")
@pytest.mark.parametrize("name", ["micro-qwen3", HYBRID])
def test_cancelled_jobs_leak_no_pages(name: str):
    model, rng = llorch.load_torch(name), np.random.default_rng(0)
    batch, running, n_refused = make_batch(model, n_tokens=6 * PAGE, n_jobs=4, chunk=40), list[int](), 0
    for _ in range(150):
        ids = [*some_ids(model, int(rng.integers(100)), 1), int(rng.integers(50))]
        ticket = batch.join(job(ids, int(rng.integers(1, 70))))
        if ticket is None:
            n_refused += 1
        else:
            running.append(ticket)
        batch.step()
        if running and rng.random() < 0.5:
            batch.leave(running.pop(int(rng.integers(len(running)))))
    assert n_refused > 20
    for ticket in running:
        batch.leave(ticket)
    assert n_free(batch) == 6
    last = varied_jobs(model)[:2]
    for actual, expected in zip(run_together(batch, last), (run_alone(model, one) for one in last), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_job_waits_for_free_rows_or_pages_and_impossible_jobs_are_refused(model: TorchModel):
    batch = make_batch(model, n_jobs=2, n_tokens=4 * PAGE)
    first = join_job(batch, [1] * PAGE, PAGE + 1)  # two pages: the last token is not fed
    assert batch.join(job([2], 2 * PAGE + 1)) is None
    second = join_job(batch, [2], 2 * PAGE)
    assert batch.join(job([3], 1)) is None
    batch.leave(second)
    batch.leave(first)
    for wrong in (job([1], 4 * PAGE + 1), job([1], 0), job([], 3)):
        with refuses(ValueError, 4 * PAGE, where="batch", got=(len(wrong.ids), wrong.max_tokens)):
            batch.join(wrong)
    with refuses(ValueError, "'nobody'", where="adapter"):
        batch.join(job([1], 2, adapter="nobody"))
    with refuses(ValueError, 1, where="batch", got="n_jobs=0"):
        make_batch(model, n_jobs=0)
    join_job(batch, [1], 4 * PAGE)


def test_finished_job_makes_no_more_tokens(model: TorchModel):
    batch = make_batch(model)
    ticket = join_job(batch, [4, 5], 2)
    assert [[*batch.step()] for _ in range(4)] == [[ticket], [ticket], [], []]


def test_running_jobs_wait_for_at_most_one_prefill_chunk(model: TorchModel):
    batch = make_batch(model, chunk=16)
    talker = join_job(batch, [7], 30)
    assert [*batch.step()] == [talker]
    readers = [join_job(batch, some_ids(model, 40, seed)) for seed in (1, 2)]
    assert [sorted(batch.step()) for _ in range(12)] == [
        [talker], [], [talker], [], [talker], [readers[0]], [talker, readers[0]], [], [talker, readers[0]],
        [], [talker, readers[0]], [readers[1]],
    ]  # fmt: skip


class FailingGuide:
    """A guide that fails in the end."""

    def __init__(self, vocab_size: int, n: int, failing_method: str) -> None:
        self.every, self.left, self.failing_method = np.ones(vocab_size, bool), n, failing_method

    def allowed(self) -> np.ndarray:
        if self.left == 0 and self.failing_method == "allowed":
            raise RuntimeError("the guide broke")
        return self.every

    def take(self, token_id: int) -> None:
        if self.left == 0 and self.failing_method == "take":
            raise RuntimeError("the guide broke")
        self.left -= 1


@pytest.mark.parametrize("failing_method", ["allowed", "take"])
@pytest.mark.parametrize("n", [0, 2])
def test_failing_guide_ends_only_its_job(model: TorchModel, failing_method: str, n: int):
    batch, good = make_batch(model), varied_jobs(model)[0]
    bad = join_job(batch, [1, 2, 3], 20, guide=FailingGuide(model.config.vocab_size, n, failing_method))
    ticket, made, errors = batch.join(good), [], []
    while len(made) < good.max_tokens:
        for of, one in batch.step().items():
            if of == ticket:
                assert isinstance(one, Sampled)
                made.append((one.id, one.logprob))
            if isinstance(one, Exception):
                errors.append((of, str(one)))
    assert errors == [(bad, "the guide broke")]
    assert made == run_alone(model, good)
    batch.leave(bad)


def test_overflow_ends_only_its_job_and_names_the_stage():
    model = llorch.load_torch("micro-llama")
    with torch.no_grad():
        model.module.model.embed_tokens.weight[9] = math.inf
    batch, good = make_batch(model), job([1, 2, 3], 8)
    bad = join_job(batch, [3] * (PAGE - 1) + [9] * 3)
    ticket, made = batch.join(good), []
    error = batch.step()
    while not error:
        error = batch.step()
    assert isinstance(error[bad], NonFiniteRun)
    assert "embed" in str(error[bad])
    batch.leave(bad)
    while len(made) < good.max_tokens:
        made += [one for of, one in batch.step().items() if of == ticket]
    assert [one.id for one in made] == [token_id for token_id, _ in run_alone(model, good)]


def test_infinity_left_in_a_page_causes_no_nan_in_the_next_job():
    model = llorch.load_torch("micro-llama")
    batch, jobs = make_batch(model, n_tokens=3 * PAGE), [job([1, 2, 3], 8), job(some_ids(model, PAGE + 40), 8)]
    bad = join_job(batch, [3] * (PAGE - 1))
    batch.step()
    for pool in batch._cache._pools:
        for store in pool:
            store[:, :, PAGE:].fill_(torch.inf)  # all but the page of nobody
    batch.leave(bad)
    for actual, expected in zip(run_together(batch, jobs), (run_alone(model, one) for one in jobs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_top_tokens_equal_the_top_logits(model: TorchModel):
    batch, ids = make_batch(model), [3, 1, 4]
    ticket = join_job(batch, ids, n_top=4)
    one = batch.step()[ticket]
    assert isinstance(one, Sampled)
    logprobs = torch.from_numpy(model.forward(ids, last_only=True)).double().log_softmax(-1)[0]
    assert [token_id for token_id, _ in one.top] == logprobs.topk(4).indices.tolist()
    np.testing.assert_allclose([p for _, p in one.top], logprobs.topk(4).values, rtol=1e-12)


def test_error_of_the_batch_is_raised(model: TorchModel, monkeypatch: pytest.MonkeyPatch):
    batch = make_batch(model)
    join_job(batch, [1, 2])
    batch.step()
    monkeypatch.setattr(batch._cache, "begin", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.step()


def test_a_compiled_model_is_refused():
    with refuses(ValueError, "compiled=False", where="batch"):
        make_batch(llorch.load_torch("micro-llama", compiled=True))
