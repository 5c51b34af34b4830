"""Sampling on the device against `llorch.ops.sampling` and against what the engines gave for the same logits."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from llorch.judging.goldens.forward import ENGINES, SAMPLINGS, Golden, read, sampler_inputs
from llorch.judging.tolerances.forward import limit_of_softmax
from llorch.ops.sampling import SamplingSettings, draw, penalise, penalise_repeats, probabilities
from llorch.pytorch import sampling
from llorch.runtime.builtin import BUILTIN, goldens_folder
from llorch.stages.comparison import measure

INF = math.inf
CPU = torch.device("cpu")
ODD = {
    "greedy": SamplingSettings(),
    "greedy with penalty": SamplingSettings(repetition_penalty=1.4),
    "encouraging": SamplingSettings(temperature=0.9, repetition_penalty=0.6),
    "one": SamplingSettings(temperature=1.0, top_k=1),
    "more than all": SamplingSettings(temperature=1.0, top_k=10**6),
    "hardly any mass": SamplingSettings(temperature=1.0, top_p=1e-9),
    "hardly any temperature": SamplingSettings(temperature=1e-6),
    "present": SamplingSettings(presence_penalty=1.5),
    "frequent": SamplingSettings(temperature=0.7, frequency_penalty=-0.7, presence_penalty=0.3, repetition_penalty=1.2),
}
ALL = dict(SAMPLINGS) | ODD


@pytest.fixture(scope="module", params=BUILTIN)
def golden(request: pytest.FixtureRequest) -> Golden:
    return read(goldens_folder() / request.param)


def on_torch(
    logits: np.ndarray, settings: Sequence[SamplingSettings], history: Sequence[int], n_prompt: int | None = None
) -> np.ndarray:
    """The same logits and history with each of the settings, as one batch."""
    answer = [] if n_prompt is None else history[n_prompt:]
    counts = torch.from_numpy(np.stack([np.bincount(answer, minlength=logits.size)] * len(settings)).astype(np.int64))
    batch = torch.from_numpy(np.stack([logits] * len(settings)))
    seen = torch.from_numpy(sampling.seen_tokens([history] * len(settings), logits.size))
    made = sampling.BatchSettings.of(settings, CPU)
    return sampling.probabilities(batch, made, sampling.Needs.of(settings), seen, counts).numpy()


def vocabulary(golden: Golden) -> int:
    return golden.engine_outputs["llamacpp"].selected_logits.size


@pytest.mark.parametrize("name", ALL)
def test_each_distribution_equals_numpy(golden: Golden, name: str):
    logits, history = sampler_inputs(golden.cases["near"].ids, vocabulary(golden))
    for dtype, rtol in ((np.float32, 2e-7), (np.float64, 1e-13)):
        expected = probabilities(logits.astype(dtype), ALL[name], history, n_prompt=2)
        actual = on_torch(logits.astype(dtype), [ALL[name]], history, 2)[0]
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=0, strict=True)


def test_rows_of_a_batch_have_their_own_settings(golden: Golden):
    logits, history = sampler_inputs(golden.cases["near"].ids, vocabulary(golden))
    for row, settings in zip(on_torch(logits, list(ALL.values()), history, 2), ALL.values(), strict=True):
        expected = probabilities(logits, settings, history, n_prompt=2)
        np.testing.assert_allclose(row, expected, rtol=2e-7, atol=0, strict=True)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_distribution_equals_the_engines(golden: Golden, name: str, engine: str):
    logits, history = sampler_inputs(golden.cases["near"].ids, vocabulary(golden))
    theirs = golden.engine_outputs[engine].probabilities[name]
    ours = on_torch(logits, [SAMPLINGS[name]], history)[0]
    np.testing.assert_array_equal(ours > 0, theirs > 0)
    assert measure(ours, theirs).within(limit_of_softmax(vocabulary(golden)))


def test_ties_are_broken_as_in_numpy():
    logits = np.array([3.0, 1.0, 3.0, 5.0, 3.0, 5.0])
    for settings in (
        SamplingSettings(),
        SamplingSettings(temperature=1.0, top_k=3),
        SamplingSettings(temperature=1.0, top_p=0.5),
        SamplingSettings(temperature=1.0, top_p=0.9),
        SamplingSettings(temperature=2.0, top_k=3, top_p=0.8),
    ):
        np.testing.assert_allclose(on_torch(logits, [settings], [])[0], probabilities(logits, settings, []), rtol=1e-14)


@pytest.mark.parametrize("seed", range(8))
def test_filters_of_a_large_vocabulary_equal_numpy_for_any_sorted_part(seed: int):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, [0.1, 1, 3, 8][seed % 4], 5000), [1, 6][seed // 4])  # flat to steep, with equals
    cases = [(0, 0.5), (0, 0.99), (40, 1.0), (40, 0.9), (1024, 0.9), (1025, 1.0), (1030, 0.7), (3000, 0.999), (0, 1.0)]
    settings = [SamplingSettings(temperature=1.0, top_k=k, top_p=p) for k, p in cases]
    expected = np.stack([probabilities(logits, one, []) for one in settings])
    together, apart = on_torch(logits, settings, []), [on_torch(logits, [one], [])[0] for one in settings]
    for actual in (together, np.stack(apart)):
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=0)


def test_top_p_stops_where_the_boundary_is_met_exactly():
    logits = np.array([0.0, -INF, 0.0])
    np.testing.assert_array_equal(on_torch(logits, [SamplingSettings(temperature=1.0, top_p=0.5)], [])[0], [1, 0, 0])


def test_the_penalty_counts_a_token_once_and_looks_at_the_sign():
    logits = torch.tensor([[4.0, -4.0, 0.0, 3.0]], dtype=torch.float64)
    seen = torch.from_numpy(sampling.seen_tokens([[0, 1, 2, 0, 0]], 4))
    actual = sampling.penalise(logits, seen, torch.tensor([[2.0]], dtype=torch.float64))
    np.testing.assert_array_equal(actual[0].numpy(), penalise(logits[0].numpy(), [0, 1, 2, 0, 0], penalty=2.0))


def test_repeats_of_the_answer_are_counted():
    logits = torch.tensor([[4.0, -4.0, 0.0, 3.0]], dtype=torch.float64)
    one, half = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
    actual = sampling.penalise_repeats(logits, torch.tensor([[3, 0, 1, 0]]), one, half)
    np.testing.assert_array_equal(
        actual[0], penalise_repeats(logits[0].numpy(), [0, 2, 0, 0], presence=1.0, frequency=0.5)
    )
    assert actual.tolist() == [[1.5, -4.0, -1.5, 3.0]]


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(temperature=1.0, top_k=2, top_p=0.9)])
def test_forbidden_token_is_never_sampled_and_keeps_its_probability(settings: SamplingSettings):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    made, needs = sampling.BatchSettings.of([settings], CPU), sampling.Needs.of([settings])
    marks, counts = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.int64)
    u, allowed = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([[False, False, True, True]])
    token, logprob = sampling.choose(logits, made, needs, marks, counts, u, allowed)
    assert token.tolist() == [[2]]
    assert logprob.item() == pytest.approx(float(logits[0].double().log_softmax(-1)[2]), abs=1e-15)


def test_draws_of_a_seed_equal_numpy(rng: np.random.Generator):
    settings = SamplingSettings(temperature=1.0, seed=7)
    distribution = probabilities(rng.normal(size=200).astype(np.float32), settings, [])
    drawn = np.random.default_rng(7)
    expected = [draw(distribution, float(drawn.random())) for _ in range(500)]
    u = torch.from_numpy(sampling.uniforms([settings], 500)).T
    assert sampling.draw(torch.from_numpy(distribution).expand(500, -1), u.contiguous())[:, 0].tolist() == expected
    assert len(set(expected)) > 50


def test_largest_random_number_draws_the_last_remaining_token():
    distribution = torch.tensor([[0, 0.1, 0.2, 0.69, 0]])
    for u, token in ((0.0, 1), (1 - 2**-53, 3)):
        assert sampling.draw(distribution, torch.tensor([[u]], dtype=torch.float64)).tolist() == [[token]]


def test_the_chosen_token_comes_with_its_log_probability_before_any_filter():
    logits = torch.tensor([[math.log(0.7), math.log(0.3)]] * 2)
    settings = [SamplingSettings(), SamplingSettings(temperature=1.0, top_k=1)]
    for some in (settings[:1], settings):
        made, needs = sampling.BatchSettings.of(some, CPU), sampling.Needs.of(some)
        seen, u = torch.zeros(len(some), 2, dtype=torch.bool), torch.full((len(some), 1), 0.9, dtype=torch.float64)
        token, logprob = sampling.choose(logits[: len(some)], made, needs, seen, seen.long(), u)
        assert not token.any()
        np.testing.assert_allclose(logprob.numpy(), math.log(0.7), rtol=1e-7)


def test_nan_logits_never_draw_an_id_beyond_the_vocabulary():
    settings = [SamplingSettings(temperature=1.0, top_k=3, top_p=0.5), SamplingSettings()]
    logits, u = torch.full((2, 9), math.nan), torch.full((2, 1), 0.99, dtype=torch.float64)
    for some in (settings, settings[1:]):
        n = len(some)
        made, needs = sampling.BatchSettings.of(some, CPU), sampling.Needs.of(some)
        seen = torch.zeros(n, 9, dtype=torch.bool)
        token, _ = sampling.choose(logits[:n], made, needs, seen, seen.long(), u[:n])
        assert 0 <= token.min() <= token.max() < 9


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        (SamplingSettings(top_k=5), (False, False, False, False)),
        (SamplingSettings(repetition_penalty=1.1), (True, False, False, False)),
        (SamplingSettings(temperature=0.5, min_p=0.1), (False, True, False, False)),
        (SamplingSettings(temperature=0.5, top_k=5), (False, True, True, False)),
        (SamplingSettings(temperature=0.5, top_p=0.5), (False, True, True, False)),
        (SamplingSettings(presence_penalty=-0.1), (False, False, False, True)),
        (SamplingSettings(frequency_penalty=0.1), (False, False, False, True)),
    ],
)
def test_decode_step_has_only_the_filters_in_use(settings: SamplingSettings, needs: tuple[bool, ...]):
    assert sampling.Needs.of([SamplingSettings(), settings]) == sampling.Needs(*needs)
