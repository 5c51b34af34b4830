from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from helpers.golden_files import read_unpacked
from helpers.refusals import refuses
from helpers.stored_goldens import golden_of

from llorch.engines import LoadPath, ReferenceEngine
from llorch.engines.interface import call_each
from llorch.families.layers import Layer, Temperature
from llorch.files import open_weights
from llorch.judging.goldens.float64_reference import require_numbers
from llorch.judging.goldens.forward import (
    ENGINES,
    FAR_POSITION,
    SAMPLINGS,
    EngineOutput,
    Golden,
    cases_for,
    n_greedy_for,
    read,
    run_cases,
    sampler_inputs,
    save,
    sha256,
)
from llorch.judging.goldens.quantised import FOLDER as QUANTISED
from llorch.judging.verify import stored, unable_engines
from llorch.runtime.builtin import BUILTIN, EVERY, builtin_path, goldens_folder
from llorch.stages.stage_ref import Pass


def thin(model: str = "micro-llama") -> Golden:
    """Goldens with one number of each array, which are written and read quickly."""
    golden = golden_of(model)

    def cut(engine_output: EngineOutput) -> EngineOutput:
        arrays = {name: array.reshape(-1)[:1] for name, array in engine_output.arrays().items()}
        return EngineOutput.from_arrays(arrays, engine_output.load_path)

    whole, engine_outputs = golden.reference, {name: cut(shown) for name, shown in golden.engine_outputs.items()}
    reference = replace(whole, engine_output=cut(whole.engine_output), step_logits=whole.step_logits[:1, :1])
    return replace(golden, engine_outputs=engine_outputs, reference=reference)


@pytest.mark.parametrize("name", BUILTIN)
def test_stored_inputs_can_show_mistakes(name: str):
    golden = golden_of(name)
    config = open_weights(builtin_path(name)).config
    assert golden.provenance["weights_sha256"] == sha256(builtin_path(name))
    near, far = golden.cases["near"], golden.cases["far"]
    assert len(set(near.ids)) >= 8
    assert near.first_position == 0
    assert len(far.ids) >= 8
    assert far.first_position == min(FAR_POSITION, config.max_position_embeddings - len(far.ids))
    assert config.n_layers >= 2
    assert 1 < config.n_kv_heads < config.n_heads


def test_engine_nan_is_refused_only_where_the_reference_is_finite():
    golden = read(goldens_folder() / "micro-llama")
    shown, reference = golden.engine_outputs["llamacpp"], golden.reference
    require_numbers("llamacpp", "llama", shown, reference)
    shown.traces["far"]["l1.ffn_act"][2, 3:5] = np.nan
    said = ("llamacpp", 2, shown.traces["far"]["l1.ffn_act"].size, "l1.ffn_act", "far", "NaN")
    for against in (reference, None):
        with refuses(ValueError, *said):
            require_numbers("llamacpp", "llama", shown, against)
    reference.engine_output.traces["far"]["l1.ffn_act"][2, 3:5] = np.nan  # as of a file that holds NaN
    require_numbers("llamacpp", "llama", shown, reference)
    with refuses(ValueError, *said):
        require_numbers("llamacpp", "llama", shown, None)


@pytest.mark.parametrize("name", BUILTIN)
def test_greedy_goldens_of_both_engines_are_equal(name: str):
    engine_outputs = golden_of(name).engine_outputs
    np.testing.assert_array_equal(engine_outputs["llamacpp"].greedy, engine_outputs["transformers"].greedy)


def test_saving_twice_gives_the_same_bytes_and_reading_gives_the_same_arrays(tmp_path: Path):
    golden = golden_of("micro-llama")
    save(tmp_path / "whole", golden)
    for folder in ("one", "two"):
        save(tmp_path / folder, thin())
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "one" / file.name).read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        assert read_unpacked(file) == read_unpacked(goldens_folder() / "micro-llama" / file.name)
    again = read(tmp_path / "whole")
    assert again.reference.isolated == golden.reference.isolated
    assert again.cases == golden.cases
    for engine in ENGINES:
        for key, array in golden.engine_outputs[engine].arrays().items():
            np.testing.assert_array_equal(again.engine_outputs[engine].arrays()[key], array)


@pytest.mark.parametrize("missing", ["golden.json", "llamacpp.safetensors.xz", "transformers.safetensors.xz"])
def test_a_missing_golden_is_an_error_that_names_the_command(tmp_path: Path, missing: str):
    save(tmp_path, thin())
    (tmp_path / missing).unlink()
    with refuses(FileNotFoundError, "reference_outputs/regenerate.py", where=tmp_path / missing):
        read(tmp_path)


def with_one_engine(golden, reasons):
    engine_outputs = {name: shown for name, shown in golden.engine_outputs.items() if name not in reasons}
    isolated = {name: golden.reference.isolated[name] for name in engine_outputs}
    reference = replace(golden.reference, isolated=isolated)
    return replace(golden, engine_outputs=engine_outputs, unsupported_reason=reasons, reference=reference)


def test_goldens_of_one_engine_store_why_the_other_is_unsupported(tmp_path: Path):
    golden = thin()
    save(tmp_path, with_one_engine(golden, {"llamacpp": "it has no window"}))
    again = read(tmp_path)
    assert (again.unsupported_reason, [*again.engine_outputs]) == ({"llamacpp": "it has no window"}, ["transformers"])
    assert not (tmp_path / "llamacpp.safetensors.xz").exists()


@pytest.mark.parametrize("reasons", [{"llamacpp": ""}, {"nobody": "why"}, dict.fromkeys(ENGINES, "why")])
def test_goldens_without_a_reason_or_without_anybody_are_refused(tmp_path: Path, reasons: dict[str, str]):
    save(tmp_path, replace(thin(), unsupported_reason=reasons))
    where = (tmp_path / "golden.json", "cannot_judge", "regenerate.py")
    with refuses(ValueError, expected=ENGINES, got=dict(sorted(reasons.items())), where=where):
        read(tmp_path)


def test_engine_is_left_out_only_where_it_is_unsupported(monkeypatch: pytest.MonkeyPatch):
    alone = with_one_engine(golden_of("micro-llama"), {"llamacpp": "why"})
    monkeypatch.setattr("llorch.judging.verify.read", lambda folder: alone)
    with refuses(ValueError, {"llamacpp": "why"}, expected={}, where="micro-llama"):
        stored("micro-llama")
    window = replace(open_weights(builtin_path("micro-qwen2")).config, layers=(Layer(window=7),) * 2, n_layers=2)
    assert list(unable_engines(ENGINES, window, range(6), 2)) == ["llamacpp"]
    assert unable_engines(ENGINES, window, range(5), 2) == {}  # no token is too far away to be seen


def test_the_far_case_begins_before_a_chunk_or_a_step_of_temperature():
    config = open_weights(builtin_path("micro-llama")).config
    chunked: dict[str, Any] = {"layers": (Layer(chunk=8192),) * config.n_layers}
    tempered: dict[str, Any] = {"temperature": Temperature(scale=0.1, floor=300, offset=0)}
    for changes, far in ((chunked, 8188), (tempered, 4196)):
        changed = replace(config, max_position_embeddings=2**14, **changes)
        assert cases_for(range(9), changed)["far"].first_position == far


def test_the_far_case_lies_as_far_on_as_the_context_allows():
    config = open_weights(builtin_path("micro-llama")).config
    ids = range(12)
    for context, far in ((2**17, 4000), (4008, 4000), (4007, 3999), (100, 92)):
        cases = cases_for(ids, replace(config, max_position_embeddings=context))
        assert cases == {"near": Pass(tuple(ids)), "far": Pass(tuple(range(8)), far)}
    assert cases_for([5, 6], replace(config, max_position_embeddings=100))["far"] == Pass((5, 6), 98)


def test_a_large_model_and_a_full_context_are_continued_by_fewer_tokens():
    config = open_weights(builtin_path("micro-llama")).config
    large = replace(config, vocab_size=10**9 // config.hidden_size)
    assert [n_greedy_for(config, config.max_position_embeddings - left) for left in (30, 3, 0)] == [24, 4, 1]
    assert [n_greedy_for(large, large.max_position_embeddings - left) for left in (30, 2)] == [4, 3]


def test_an_engine_is_asked_for_every_case_setting_and_token():
    engine = Mock(spec=ReferenceEngine, load_path=LoadPath("an engine", "an engine"))
    engine.trace.side_effect = lambda ids, first_position: {"logits": np.array([first_position])}
    engine.selected_logits.return_value = np.zeros(50, np.float32)
    engine.probabilities.side_effect = lambda logits, settings, history: logits
    engine.greedy.side_effect = lambda ids, n: [4] * n
    engine.call_batch.side_effect = partial(call_each, engine)
    near = (3, 1, 2)
    taken = run_cases(engine, {"near": Pass(near), "far": Pass((3, 1), 400)})
    assert engine.trace.call_args_list == [call(near, first_position=0), call((3, 1), first_position=400)]
    assert engine.selected_logits.call_args_list == [call(near)]
    assert engine.greedy.call_args_list == [call(near, 24)]
    asked = [(settings, history) for _, settings, history in (c.args for c in engine.probabilities.call_args_list)]
    assert asked == [(settings, sampler_inputs(near, 50)[1]) for settings in SAMPLINGS.values()]
    assert {case: trace["logits"].tolist() for case, trace in taken.traces.items()} == {"near": [0], "far": [400]}
    assert taken.greedy.tolist() == [4] * 24
    assert taken.probabilities.keys() == SAMPLINGS.keys()
    assert taken.load_path == engine.load_path


def test_the_sampler_sees_logits_of_both_signs_and_likely_tokens_that_repeat():
    logits, history = sampler_inputs((9, 8, 7, 6), 400)
    assert (logits > 1).any()
    assert (logits < -1).any()
    counts, likely = np.bincount(history, minlength=400), np.argsort(-logits)[:4]
    assert {9, 8, 7, 6, *likely} == set(np.flatnonzero(counts))
    assert counts[[9, 8, 7, *likely]].min() > 1


@pytest.mark.parametrize("part", ["far", "tokens", "tensors"])
def test_a_golden_without_one_of_its_parts_is_refused(tmp_path: Path, part: str):
    golden = thin()
    changes: dict[str, dict] = {
        "far": {"cases": {"near": golden.cases["near"]}}, "tokens": {"tokens": []}, "tensors": {"tensors": {}},
    }  # fmt: skip
    save(tmp_path, changed := replace(golden, **changes[part]))
    counts = (sorted(changed.cases), f"{len(changed.tensors)} tensors", f"{len(changed.tokens)} texts")
    expected = ("near", "far", "tensors", "tokens")
    with refuses(ValueError, expected=expected, got=counts, where=(tmp_path / "golden.json", "regenerate.py")):
        read(tmp_path)


def test_golden_without_distances_of_both_engines_is_refused(tmp_path: Path):
    golden = thin()
    isolated = {"llamacpp": golden.reference.isolated["llamacpp"]}
    save(tmp_path, replace(golden, reference=replace(golden.reference, isolated=isolated)))
    where = (tmp_path / "golden.json", "isolated")
    with refuses(ValueError, expected=ENGINES, got=["llamacpp"], where=where):
        read(tmp_path)


def test_all_goldens_together_stay_under_60_megabytes():
    files = [file for name in (*EVERY, QUANTISED) for file in (goldens_folder() / name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 60e6
