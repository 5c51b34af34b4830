"""Diagnosis of whole dumps: what is right is never accused, what was planted is named, gaps and later bugs included."""

import pytest
from planted import MICRO, golden_of
from planted_dumps import BLOCKS, WHOLE, dumped, mistake, passes, wide

from llorch.dumps.stage_dump import StageDump, Tokens
from llorch.verify.diagnosis.diagnose import diagnose
from llorch.verify.diagnosis.hypotheses import known_mistakes
from llorch.verify.diagnosis.trials import stage_of
from llorch.verify.diagnosis.verdict import Diagnosis, Finding, Suspect
from llorch.verify.goldens import PRODUCERS

MODEL = "micro-qwen3"
MISTAKES = [each.name for each in known_mistakes(wide(MODEL).config) if each.name != "cache-heads-repeated"]
SAME_FROM_ZERO = {"rope-position-frozen": "rope-missing"}


def names(found: Finding) -> set[str]:
    return {each.name for each in (*found.suspects, *found.alternatives)}


def suspect(made: Diagnosis) -> Suspect:
    (found,) = made.findings
    return found.suspects[0]


@pytest.mark.parametrize("case", ["near", "far"])
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("model", MICRO)
def test_what_an_engine_of_others_shows_is_right(model: str, producer: str, case: str):
    this, trace = golden_of(model).cases[case], golden_of(model).evidence[producer].traces[case]
    for shown in ([*trace], ["logits"], [key for key in trace if BLOCKS(key)], [key for key in trace if "l1." in key]):
        dump = StageDump.of_arrays([Tokens(this.ids, this.first_position)], {key: trace[key] for key in shown})
        found = diagnose(wide(model), dump)
        assert found.findings == []
        assert {result.key for result in found.results} == {*shown}
        assert max(result.over for result in found.results) < 1


@pytest.mark.parametrize("name", MISTAKES)  # no engine could go on with a cache of repeated heads
def test_a_planted_mistake_is_named_where_all_is_shown(name: str):
    model, planted = MODEL, mistake(name, MODEL)
    tokens = passes(model, 5, 7) if planted.after_cached else passes(model)
    places = planted.at(tuple(f"l{layer}.{stage}" if stage not in ("embed", "final_norm", "logits") else stage
                              for layer in range(wide(model).config.n_layers) for stage in planted.stages))  # fmt: skip
    found = diagnose(wide(model), dumped(model, tokens, planted.change(places), WHOLE))
    first = found.findings[0]
    assert SAME_FROM_ZERO.get(name, name) == first.suspects[0].name
    assert stage_of(first.key) in planted.stages
    assert first.suspects[0].share > 0.7
