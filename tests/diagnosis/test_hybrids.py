"""Dumps of hybrids: a prompt, one token, a few more; the memory of a delta net goes from pass to pass."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from faults.wrong_dumps import dumped, everywhere, mistake, passes, wide

from llorch.diagnosis.diagnose import causes
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import Weights, open_weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.stages.stage_ref import Pass

pytestmark = pytest.mark.live  # transformers makes the models

CUTS = (0, 70, 71, 75)
IDS = tuple(i * 31 % 100 + 3 for i in range(CUTS[-1]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    from builders.families import random_folder

    return open_weights(random_folder("qwen3_5", tmp_path_factory.mktemp("hybrid") / "m", 5))


def dump(
    weights: Weights, wrong: Callable[[int, str, np.ndarray], np.ndarray], shown: tuple[str, ...] = ()
) -> StageDump:
    """Three passes of llorch with an error; the dump has all stages, or those with these ends."""
    cache, traces = KVCache(weights.config, np.float32), [dict[str, np.ndarray]() for _ in CUTS[1:]]
    for n_pass, trace in enumerate(traces):

        def keep(name: str, array: np.ndarray, trace: dict = trace, n_pass: int = n_pass) -> np.ndarray:
            made = wrong(n_pass, name, array)
            if not shown or name.endswith(shown):
                trace[name] = made
            return made

        forward(np.asarray(IDS[CUTS[n_pass] : CUTS[n_pass + 1]]), weights, cache, keep=keep)
    passes = [Pass(IDS[a:b], a) for a, b in pairwise(CUTS)]
    return StageDump.of_arrays(passes, *traces)


@pytest.mark.nightly_cases(but=["shown2"])
@pytest.mark.parametrize(
    "shown", [(), *(pytest.param(x, marks=pytest.mark.slow) for x in (("block_out",), ("delta_out",)))]
)
def test_what_is_right_is_not_blamed(weights: Weights, shown: tuple[str, ...]):
    right = dump(weights, lambda n_pass, name, array: array, shown)
    assert list(causes(weights.astype(np.float64), right)) == []


@pytest.mark.nightly_cases(but=["l2.conv_state-1-<lambda>"])
@pytest.mark.parametrize(
    ("at", "n_pass", "change"),
    [
        ("l0.delta_state", 0, np.zeros_like),  # the next pass forgets the prompt
        pytest.param("l1.beta", 0, lambda array: array * np.float32(1.001), marks=pytest.mark.slow),
        pytest.param("l2.conv_state", 1, lambda array: array[::-1].copy(), marks=pytest.mark.slow),
        pytest.param("l3.attn_gate", 2, lambda array: 1 - array, marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_is_found_where_it_is_made(weights: Weights, at: str, n_pass: int, change):
    wrong = dump(weights, lambda n, name, array: change(array) if (name, n) == (at, n_pass) else array)
    (finding,) = causes(weights.astype(np.float64), wrong)
    assert (finding.key, finding.n_pass) == (at, n_pass)


@pytest.mark.parametrize("model", ["micro-qwen3.5-moe", "micro-qwen3-next"])
def test_a_memory_that_is_forgotten_between_passes_is_named(model: str):
    change = everywhere(mistake("delta-past-forgotten", model), wide(model))
    (finding,) = causes(wide(model), dumped(model, passes(model, 10, 2), change))
    assert (finding.key, finding.n_pass, finding.suspects[0].name) == ("l0.delta_state", 1, "delta-past-forgotten")
