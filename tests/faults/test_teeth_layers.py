"""Faults where no golden reaches: windows, short chunks, other ramps of YaRN; random models, judged by transformers.

Each is a test of its checkpoint, too: `pytest -k checkpoint_{number}`.
"""

from pathlib import Path

import numpy as np
import pytest
from builders.families import random_folder
from faults.situations import by_name, chain, first_failing, models_of
from faults.wrong_dumps import dump_of, everywhere, mistake_in

from llorch.diagnosis.diagnose import diagnose
from llorch.diagnosis.mistakes import STAGE_MISTAKES, Mistake
from llorch.diagnosis.mistakes.cache import LAYERS
from llorch.diagnosis.mistakes.stage_inputs import StageInputs, stage_inputs
from llorch.diagnosis.mistakes.variants import VISIBLE, apply_mistake
from llorch.diagnosis.search.hypotheses import setting_families
from llorch.engines import EngineName
from llorch.engines.dumps.stage_dump import StageDump
from llorch.files import open_weights
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.verify import plan_live, run_engines
from llorch.stages.comparison import measure
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME, key

pytestmark = pytest.mark.live
ENGINE: EngineName = "transformers"  # llama.cpp knows no windows and chunks of 8192 alone
IDS = tuple(int(token) for token in np.random.default_rng(0).integers(3, 100, 30))
MODELS = {
    "mistral": ("mistral", {"sliding_window": 9, "num_hidden_layers": 2}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "smollm3": ("smollm3", {}),
    "ministral3": ("ministral3", {}),
    "llama4": ("llama4", {"attention_chunk_size": 16, "floor_scale": 8}),
}
UNSHOWN = [mistake for mistake in STAGE_MISTAKES if not models_of(mistake)]


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ForwardExpectations]:
    folder = tmp_path_factory.mktemp("layers")

    def suite(path: Path) -> ForwardExpectations:
        plan = plan_live(open_weights(path), IDS, (ENGINE,))
        shown = run_engines(plan, progress=print, failed=None)
        return ForwardExpectations("m", shown.weights, plan.cases, shown.engine_outputs, shown.reference)

    return {name: suite(random_folder(family, folder / name, 0, **own)) for name, (family, own) in MODELS.items()}


@pytest.mark.nightly_cases(but=["checkpoint_04_window-in-o*"])
@pytest.mark.parametrize("mistake", dict.fromkeys((*UNSHOWN, *LAYERS)), ids=by_name)
def test_mistake_fails_by_far_and_is_named(mistake: Mistake[StageInputs], suites: dict[str, ForwardExpectations]):
    able = [suite for suite in suites.values() if mistake.applies_to(suite.weights.config)]
    assert able
    for suite in able:
        for name in (name for name in mistake.stages if BY_NAME[name].applies_to(suite.weights.config)):
            place = name, mistake.first_layer(name, suite.weights.config)
            assert isolated_excess(mistake, suite, *place) >= VISIBLE, place
            trace = chain(mistake, suite.weights, suite.cases["near"], name)
            assert first_failing(trace, suite, "near", ENGINE, 0) == place
        assert diagnosed_causes(mistake.name, suite) == [mistake.name]


@pytest.mark.parametrize("model", MODELS)
def test_engine_outputs_are_not_accused(model: str, suites: dict[str, ForwardExpectations]):
    suite = suites[model]
    dump = StageDump.of_arrays([suite.cases["near"]], suite.engine_outputs[ENGINE].traces["near"])
    assert diagnose(suite.weights.astype(np.float64, keep=True), dump).findings == []


@pytest.mark.parametrize("value", [5, 14])
def test_a_window_of_another_size_is_recovered(value: int, suites: dict[str, ForwardExpectations]):
    weights = suites["mistral"].weights.astype(np.float64, keep=True)
    families = setting_families(weights.config)
    window = next(family for family in families if family.name == "mask-window").hypothesis(value)
    (found,) = diagnose(weights, dump_of(weights, [Tokens(IDS, 0)], everywhere(window, weights))).findings
    assert (found.causes[0].name, found.causes[0].value) == ("mask-window", str(value))
    assert "config has another" in found.sentence


def isolated_excess(mistake: Mistake[StageInputs], suite: ForwardExpectations, stage: str, layer: int | None) -> float:
    """By what factor it exceeds the limit where it is given what the engine showed."""
    trace, place = suite.engine_outputs[ENGINE].traces["near"], key(stage, layer)
    inputs = stage_inputs(BY_NAME[stage], layer, suite.weights, suite.cases["near"], trace, reads=mistake.reads)
    wrong = apply_mistake(mistake, inputs, stage)
    return measure(wrong, trace[place], masked=BY_NAME[stage].masked).over(suite.tolerances("near").isolated(place))


def diagnosed_causes(name: str, suite: ForwardExpectations) -> list[str]:
    """Diagnose a dump of a run that has the mistake wherever it can be made."""
    weights = suite.weights.astype(np.float64, keep=True)
    dump = dump_of(weights, [Tokens(IDS, 0)], everywhere(mistake_in(name, weights), weights))
    return [cause.name for found in diagnose(weights, dump).findings for cause in found.causes]
