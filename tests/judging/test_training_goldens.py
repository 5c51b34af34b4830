"""Training goldens on disk, and what their judge refuses."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.golden_files import read_unpacked
from helpers.refusals import assert_tells, refuses
from helpers.stored_goldens import training_golden_of, training_weights_of

from llorch.judging.expectations.training import comparisons, make_expectations
from llorch.judging.expectations.training_refs import MODES
from llorch.judging.goldens import store as golden_store
from llorch.judging.goldens.training import FILES, MODELS, TrainingGolden, names, save
from llorch.ops.numerics import DtypeName
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import FAIL
from llorch.stages.training import BY_GROUP
from reference_outputs.training_tolerances import refuse_far_engines, tolerances

MODEL = "micro-qwen3"
CONFIG = training_weights_of(MODEL).config


@pytest.fixture
def golden() -> TrainingGolden:
    return training_golden_of(MODEL)


def test_goldens_are_written_as_the_bytes_that_were_read(
    golden: TrainingGolden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(golden_store, "_FILTERS", [{"id": lzma.FILTER_LZMA2, "preset": 0}])  # ten times as fast
    save(tmp_path, golden)
    for name in FILES:
        assert read_unpacked(tmp_path / name) == read_unpacked(goldens_folder() / MODEL / name)


@pytest.mark.parametrize("model", MODELS)
def test_stored_tolerances_follow_from_the_stored_arrays(model: str):
    golden = training_golden_of(model)
    stored, made = golden.tolerances["float32"], tolerances(golden, training_weights_of(model).config, "float32")
    assert {mode: {*groups} for mode, groups in made.items()} == {mode: {*groups} for mode, groups in stored.items()}
    for mode, groups in made.items():
        for group, tolerance in groups.items():
            same, place = stored[mode][group], f"{mode} {group}"
            assert (same.error, same.worst) == pytest.approx((tolerance.error, tolerance.worst), rel=1e-3), place


def test_what_is_exactly_zero_is_listed_and_comes_back(golden: TrainingGolden):
    record = json.loads((goldens_folder() / MODEL / FILES[1]).read_text())
    zero = {name for name in record["exactly_zero"] if name.startswith("peft/zero_b/")}
    assert len(zero) == 14  # A of seven matrices in two layers
    assert all(golden.arrays[name].shape for name in zero)


@pytest.mark.parametrize("model", MODELS)
def test_places_name_every_array_of_the_file_and_no_other(model: str):
    found = list(names(training_weights_of(model).config.n_layers))
    assert len(found) == len({*found})
    assert {*found} == training_golden_of(model).arrays.keys()
    expectations = make_expectations(training_golden_of(model), training_weights_of(model).config, "float32")
    assert {expectation.stage_ref.stage for expectation in expectations} == BY_GROUP.keys() - {"adapter_file"}


@pytest.mark.parametrize("name", list(names(CONFIG.n_layers))[::41])
def test_a_single_array_that_is_missing_is_no_pass(golden: TrainingGolden, name: str):
    fewer = replace(golden, arrays={other: array for other, array in golden.arrays.items() if other != name})
    with refuses(ValueError, "1 arrays", "missing", name, "reference_outputs/regenerate.py", where=FILES[0]):
        next(make_expectations(fewer, CONFIG, "float64"))


@pytest.mark.parametrize("key", ["plain/l0.gradient.q_proj.lora_A", "step 1/l0.parameters.up_proj.lora_B"])
def test_peft_output_far_from_the_reference_is_refused(golden: TrainingGolden, key: str):
    far = replace(golden, arrays=golden.arrays | {f"peft/{key}": golden.arrays[f"peft/{key}"] * np.float32(1.1)})
    with refuses(ValueError, f"peft chained {key}", "error"):
        refuse_far_engines(MODEL, far, CONFIG, "float32")


@pytest.mark.parametrize("name", ["peft/plain/l9.gradient.q_proj.lora_A", "truth/chained/curve/los_curve"])
def test_an_array_that_nothing_is_compared_with_is_refused(golden: TrainingGolden, name: str):
    more = replace(golden, arrays={**golden.arrays, name: np.ones(2, np.float32)})
    with refuses(ValueError, "1 arrays", "stage", name, where=FILES[0]):
        next(make_expectations(more, CONFIG, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_array_that_a_backend_does_not_make_fails(golden: TrainingGolden, dtype: DtypeName):
    wanted = list(make_expectations(golden, CONFIG, dtype))
    ours = {
        mode: {expectation.stage_ref: expectation.expected for expectation in wanted if expectation.mode == mode}
        for mode in MODES
    }
    assert all(c.verdict != FAIL for c in comparisons(MODEL, iter(wanted), ours, "made-up"))
    ours["chained"] = {place: array for place, array in ours["chained"].items() if place.stage != "loss_curve"}
    (comparison,) = (c for c in comparisons(MODEL, iter(wanted), ours, "made-up") if c.verdict == FAIL)
    assert (comparison.stage_ref.name, comparison.mode) == ("loss_curve", "chained")
    assert_tells(comparison.note.removeprefix("got:"), got="nothing")
