"""The script that makes the goldens: `--check` sees every kind of difference; far engines are refused."""

import importlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers.golden_files import read_unpacked
from helpers.refusals import assert_tells, refuses
from helpers.stored_goldens import golden_of, suite_of, training_golden_of, weights_of

from llorch.files import Weights
from llorch.judging.goldens import store as golden_store
from llorch.judging.goldens.forward import ENGINES, EngineOutput, Golden, ReferenceOutput, TokenCheck
from llorch.judging.goldens.long_contexts import read_long
from llorch.judging.goldens.training import FILES
from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.judging.tolerances.forward import ForwardTolerances
from llorch.runtime.builtin import EVERY, goldens_folder
from llorch.stages.comparison import Difference
from llorch.stages.stage_ref import Pass

NAME = "micro-qwen3"
SCRIPT = goldens_folder() / "regenerate.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # as when it is run
        made = importlib.import_module("regenerate")
        patch.setattr(made, "limits_of", derived_once(made.limits_of))
        yield made


def derived_once(limits_of: Callable) -> Callable:
    """Derive the limits of the stored goldens once; those of other goldens each time."""
    stored = golden_of(NAME)
    limits = cache(lambda: limits_of(weights_of(NAME), stored.cases, stored.reference))

    def shared(weights: Weights, cases: Mapping[str, Pass], reference: ReferenceOutput) -> dict[str, ForwardTolerances]:
        is_stored = cases is stored.cases and reference is stored.reference
        return limits() if is_stored else limits_of(weights, cases, reference)

    return shared


@pytest.fixture
def golden() -> Golden:
    return golden_of(NAME)


def changed(golden: Golden, name: str, change: Callable[[np.ndarray], np.ndarray], engine: str) -> Golden:
    arrays = golden.engine_outputs[engine].arrays()
    arrays[name] = change(arrays[name].copy())
    return replace(golden, engine_outputs={**golden.engine_outputs, engine: of_arrays(golden, engine, arrays)})


def of_arrays(golden: Golden, engine: str, arrays: dict[str, np.ndarray]) -> EngineOutput:
    return EngineOutput.from_arrays(arrays, golden.engine_outputs[engine].load_path)


def one_number(array: np.ndarray) -> np.ndarray:
    """Changed so little that only its own tolerance can show it, or by one where it is an integer."""
    at = int(np.argmax(np.where(np.isfinite(array), array, 0)))
    array.flat[at] += 1 if array.dtype.kind == "i" else 2e-3 * array.flat[at]
    return array


def unmasked(array: np.ndarray) -> np.ndarray:
    array[0, 0, -1] = -1e4
    return array


def not_a_number(array: np.ndarray) -> np.ndarray:
    array.flat[3] = np.nan
    return array


def test_goldens_made_again_without_a_change_have_no_differences(script: ModuleType, golden: Golden):
    assert script.differences(NAME, golden, golden) == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("near/embed", one_number),
        ("far/l1.k_rope", one_number),
        ("near/l0.attn_scores", one_number),
        ("near/l0.attn_scores", unmasked),
        ("near/logits", one_number),
        ("near/selected_logits", one_number),
        ("near/probabilities.top_p", one_number),
        ("near/generation", one_number),
        ("near/generation", lambda array: array[:-1]),
        ("far/l0.ffn_up", lambda array: array.astype(np.float64)),
        ("far/l0.ffn_up", not_a_number),
    ],
)
def test_one_difference_is_one_line_that_names_it(
    script: ModuleType, golden: Golden, engine: str, name: str, change: Callable[[np.ndarray], np.ndarray]
):
    other = changed(golden, name, change, engine)
    for new, stored in ((other, golden), (golden, other)):
        (line,) = script.differences(NAME, new, stored)
        assert line.startswith(f"{engine} {name}: ")


def test_what_is_no_number_in_both_is_a_difference(script: ModuleType, golden: Golden):
    both = changed(golden, "near/l0.attn_out", not_a_number, "llamacpp")
    (line,) = script.differences(NAME, both, both)
    assert line.startswith("llamacpp near/l0.attn_out: non-finite: 1 of ")


def test_the_derived_limit_decides(script: ModuleType, golden: Golden):
    allowed = suite_of(NAME).tolerances("near").chained("logits")
    for times, lines in ((0.2, 0), (2, 1)):
        other = changed(golden, "near/logits", lambda a, k=times: a * np.float32(1 + k * allowed.error), "llamacpp")
        assert len(script.differences(NAME, other, golden)) == lines


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_on_one_side_only_is_a_difference(script: ModuleType, golden: Golden, engine: str):
    arrays = golden.engine_outputs[engine].arrays()
    del arrays["far/l0.q_norm"]
    less = replace(golden, engine_outputs={**golden.engine_outputs, engine: of_arrays(golden, engine, arrays)})
    for new, stored in ((less, golden), (golden, less)):
        assert script.differences(NAME, new, stored) == [f"{engine} far/l0.q_norm: only on one side"]


def test_another_route_into_an_engine_is_a_difference(script: ModuleType, golden: Golden):
    shown = golden.engine_outputs["llamacpp"]
    other = replace(shown, load_path=replace(shown.load_path, written="someone"))
    new = replace(golden, engine_outputs={**golden.engine_outputs, "llamacpp": other})
    (line,) = script.differences(NAME, new, golden)
    assert line.startswith(f"llamacpp: {other.load_path}; ")
    assert line.endswith(f": {shown.load_path}")
    assert "someone" in str(other.load_path)


def test_other_inputs_tensors_and_token_ids_are_differences(script: ModuleType, golden: Golden):
    cases = {**golden.cases, "near": Pass(golden.cases["near"].ids, 1)}
    assert script.differences(NAME, replace(golden, cases=cases), golden) == ["cases: not as stored"]
    tensors = {**golden.tensors, "output_norm.weight": "F32 64 0"}
    assert script.differences(NAME, replace(golden, tensors=tensors), golden) == ["tensors: not as stored"]
    tokens = [*golden.tokens[:-1], TokenCheck(golden.tokens[-1].text, {"llamacpp": [1]})]
    assert script.differences(NAME, replace(golden, tokens=tokens), golden) == ["tokens: not as stored"]


@pytest.fixture
def golden_folder(tmp_path: Path) -> Path:
    """A copy of the stored goldens of the model: making them takes long, as xz packs them."""
    return Path(shutil.copytree(goldens_folder() / NAME, tmp_path / NAME))


def command(script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, golden: Golden, *words: str) -> Result:
    """The command on another folder of goldens, with engines that give `golden`."""
    monkeypatch.setattr(script, "FOLDER", folder)
    monkeypatch.setattr(script, "make", lambda name: golden)
    monkeypatch.setattr(script, "make_long", lambda path, engines, weights_sha256: read_long(goldens_folder() / NAME))
    monkeypatch.setattr(script.make_training, "make_training", training_golden_of)
    without_peft = lambda new, stored_golden, weights: script.make_training.differences(  # noqa: E731
        new, stored_golden, weights.config, {}, stored_golden.arrays
    )
    monkeypatch.setattr(script.make_training, "checked", without_peft)
    monkeypatch.setattr(script, "run_reference", lambda *arguments, n_greedy: golden_of(NAME).reference)
    return CliRunner().invoke(script.main, [NAME, *words])


def test_check_exits_with_0_when_goldens_are_reproduced(
    script: ModuleType, golden: Golden, golden_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    done = command(script, monkeypatch, golden_folder.parent, golden, "--check")
    assert done.exit_code == 0
    assert done.stdout == f"{NAME}: reproduced\n"


def test_check_exits_with_1_names_the_golden_and_writes_nothing(
    script: ModuleType, golden: Golden, golden_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    before = {file.name: file.read_bytes() for file in golden_folder.iterdir()}
    made = changed(golden, "near/l1.block_out", one_number, "transformers")
    done = command(script, monkeypatch, golden_folder.parent, made, "--check")
    assert done.exit_code == 1
    assert done.stdout.startswith("transformers near/l1.block_out: error ")
    assert {file.name: file.read_bytes() for file in golden_folder.iterdir()} == before


@pytest.mark.parametrize("factor", [9, 1 / 9, 1.01])
def test_check_is_red_where_a_stored_distance_does_not_follow_from_the_goldens(
    script: ModuleType, golden: Golden, monkeypatch: pytest.MonkeyPatch, factor: float
):
    isolated: Any = deepcopy(golden.reference.isolated)
    old = isolated["llamacpp"]["far"]["l0.ffn_up"]
    isolated["llamacpp"]["far"]["l0.ffn_up"] = replace(old, worst=factor * old.worst)
    without = replace(golden, reference=replace(golden.reference, isolated=isolated))
    monkeypatch.setattr(script, "read", lambda folder: without)
    monkeypatch.setattr(script, "training", lambda name, folder, check: [])
    done = command(script, monkeypatch, goldens_folder(), golden, "--check")
    assert done.exit_code == 1
    assert done.stdout.startswith("distance of llamacpp, far l0.ffn_up: ")


ARRAYS = ("llamacpp.safetensors.xz", "transformers.safetensors.xz", "long.safetensors.xz")


@pytest.mark.parametrize("missing", ["golden.json", "long.json", *ARRAYS, *FILES])
def test_check_of_a_missing_golden_is_an_error(
    script: ModuleType, golden: Golden, golden_folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str
):
    (golden_folder / missing).unlink()
    if missing in FILES:
        monkeypatch.setattr(script, "built_in", lambda name, folder, check: [])
    done = command(script, monkeypatch, golden_folder.parent, golden, "--check")
    assert done.exit_code != 0
    assert isinstance(done.exception, FileNotFoundError)
    assert_tells(str(done.exception), golden_folder / missing)
    assert done.stdout == ""


@pytest.mark.slow
def test_without_check_it_writes(script: ModuleType, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (filters,) = golden_store._FILTERS
    monkeypatch.setattr(golden_store, "_FILTERS", [{**filters, "preset": 0}])  # packed fast, and read as any other
    done = command(script, monkeypatch, tmp_path, golden)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{NAME}: written to {NAME}, ")
    for file in (goldens_folder() / NAME).iterdir():
        assert read_unpacked(tmp_path / NAME / file.name) == read_unpacked(file)


def refuse(script: ModuleType, golden: Golden) -> None:
    script.refuse_far_engines(NAME, weights_of(NAME), golden.cases, golden.engine_outputs, golden.reference)


def test_stored_engine_outputs_are_close_to_the_reference(script: ModuleType, golden: Golden):
    refuse(script, golden)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name", ["near/l1.ffn_gate", "far/l0.v_proj", "near/selected_logits", "near/probabilities.all"]
)
@pytest.mark.parametrize("change", [lambda a: a * np.float32(1.003), not_a_number])
def test_engine_output_far_from_the_reference_is_refused_by_name(
    script: ModuleType, golden: Golden, engine: str, name: str, change: Callable
):
    what = "non-finite" if change is not_a_number else "error"
    with refuses(ValueError, f"regenerate {NAME}: 1", f"{engine} chained {name}: {what}"):
        refuse(script, changed(golden, name, change, engine))


def test_engine_output_with_a_large_isolated_error_is_refused(script: ModuleType, golden: Golden):
    isolated: Any = deepcopy(golden.reference.isolated)
    isolated["llamacpp"]["far"]["l0.ffn_up"] = Difference(1e-4, 1e-4)
    with refuses(ValueError, f"regenerate {NAME}: 1", "llamacpp isolated far/l0.ffn_up: error"):
        refuse(script, replace(golden, reference=replace(golden.reference, isolated=isolated)))


class Replayed:
    """An engine that shows again what the goldens say it showed."""

    def __init__(self, name: str, golden: Golden) -> None:
        self.name = name
        self.golden = golden

    def __enter__(self) -> "Replayed":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int] | None:
        assert add_special
        assert not parse_special
        return next(check.ids.get(self.name) for check in self.golden.tokens if check.text == text)

    def provenance(self) -> dict[str, object]:
        return {"producer": self.name}


def replayed(script: ModuleType, patch: pytest.MonkeyPatch, golden: Golden) -> None:
    patch.setattr(script, "open_engine", lambda name, path, n_threads: Replayed(name, golden))
    patch.setattr(script, "run_reference", lambda path, cases, engine_outputs, n_greedy: golden.reference)
    patch.setattr(script, "run_cases", lambda engine, cases: golden.engine_outputs[engine.name])


def test_engine_outputs_become_goldens(script: ModuleType, golden: Golden, monkeypatch: pytest.MonkeyPatch):
    replayed(script, monkeypatch, golden)
    made = script.make(NAME)
    assert script.differences(NAME, made, golden) == []
    assert made.provenance["weights_sha256"] == golden.provenance["weights_sha256"]
    route = {"route": golden.reference.engine_output.load_path.stored()}
    assert made.provenance["engines"] == {name: {"producer": name} for name in ENGINES} | {"truth": route}


def test_engine_output_far_from_the_reference_writes_no_golden(
    script: ModuleType, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replayed(script, monkeypatch, changed(golden, "near/l0.ffn_out", lambda array: 1.01 * array, "llamacpp"))
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    done = CliRunner().invoke(script.main, [NAME])
    assert done.exit_code != 0
    assert isinstance(done.exception, ValueError)
    assert_tells(str(done.exception), "llamacpp chained near/l0.ffn_out: error")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EVERY)
def test_the_stored_input_is_the_beginning_of_the_prompt(script: ModuleType, name: str):
    prompt, n_tokens = script.prompt_of(name)
    ids = script.prompt_ids(weights_of(name), prompt, n_tokens)
    stored = json.loads((goldens_folder() / name / "golden.json").read_text())
    assert ids == stored["cases"]["near"]["ids"]
    assert stored["provenance"]["prompt"] == prompt
    assert [check["text"] for check in stored["tokens"]] == list(script.TEXTS)


def test_a_prompt_that_repeats_itself_is_refused(script: ModuleType):
    with refuses(ValueError, expected=8, got="["):
        script.prompt_ids(weights_of(NAME), "a a a a a a a a a a a a", 12)


def test_long_goldens_made_again_are_compared_one_by_one(script: ModuleType):
    stored = read_long(goldens_folder() / NAME)
    assert script.long_differences(stored, stored) == []
    name = "l0.attn_context"
    array = stored.reference["long"][name] * (1 + 1e-9)
    reference: Any = {**stored.reference, "long": {**stored.reference["long"], name: array}}
    (line,) = script.long_differences(replace(stored, reference=reference), stored)
    assert line.startswith(f"long {name}: error ")
    far: Any = deepcopy(stored.distances)
    far["llamacpp"]["long"][name] = Difference(1e-3, 1e-3)
    (line,) = script.long_differences(replace(stored, distances=far), stored)
    assert line.startswith(f"distance of llamacpp, long {name}: ")
    assert script.long_differences(replace(stored, cases={}), stored)[0].startswith("long contexts: ")


@pytest.fixture(scope="module")
def goldens() -> ModuleType:
    spec = spec_from_file_location("ci_goldens", Path(__file__).parents[2] / ".ci/goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("extent", "n_models", "n_dtypes"), [("day", 5, 1), ("nightly", len(EVERY), 3)])
def test_each_model_is_made_again_and_checked_in_each_dtype_of_torch(
    goldens: ModuleType, extent: str, n_models: int, n_dtypes: int
):
    lines = goldens.commands(extent)
    made = [line.split()[3:] for line in lines if line.startswith("python reference_outputs/regenerate.py --check ")]
    verified = [line.split()[2:-4] for line in lines if line.split()[-4:-1] == ["--backend", "torch", "--dtype"]]
    names = [name for models in made for name in models]
    assert {*names} <= {"quantised", *EVERY}
    assert len(names) == len({*names}) == n_models + 1
    assert [sorted(models) for models in verified] == [sorted(names)] * n_dtypes
    assert len(lines) == len(made) + n_dtypes


def test_a_model_with_goldens_of_training_has_a_process_of_its_own(goldens: ModuleType):
    made = [line.split()[3:] for line in goldens.commands("nightly") if "regenerate.py" in line]
    assert sorted(map(len, made)) == [1] * len(TRAINED) + [1 + len(EVERY) - len(TRAINED)]
    assert {*TRAINED} == {name for names in made[:-1] for name in names}
