"""benchmarks/diagnosis: the port without its bugs is right, and every bug changes the stage that it names."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.diagnosis import cases as corpus
from benchmarks.diagnosis import styles
from benchmarks.diagnosis.bugs import BUGS, Bug, together
from benchmarks.diagnosis.cases import Case, cases, correct_diagnosis_of, first_shown, passes_of, run, run_case, unseen
from benchmarks.diagnosis.expected import ALIKE, NAMES, VALUES
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import STYLES, shown, stage_keys
from llorch.engines.dumps.index import open_raw
from llorch.engines.dumps.mapping import read_mapping
from llorch.engines.dumps.stage_mapping import stage_dump
from llorch.files import open_weights
from llorch.judging.goldens.store import SUFFIX, read_arrays
from llorch.runtime.builtin import BUILTIN, builtin_path, goldens_folder
from llorch.stages.table import forward_order


@cache
def reference_arrays(model: str) -> dict[str, np.ndarray]:
    return read_arrays(goldens_folder() / model / f"truth{SUFFIX}")


@pytest.mark.parametrize("cuts", [(), (5,), (6, 7)], ids=["whole", "chunks", "steps"])
@pytest.mark.parametrize("case", ["near", "far"])
@pytest.mark.parametrize("model", BUILTIN)
def test_the_port_is_right(model: str, case: str, cuts: tuple[int, ...]):
    tokens = json.loads((goldens_folder() / model / "golden.json").read_text())["cases"][case]
    port = Port(model, tokens["first_position"])
    for part in np.split(tokens["ids"], cuts):
        port.run(part.tolist())
    correct = reference_arrays(model)
    for name, actual in stage_keys(port.tape[-1]).items():
        expected = correct[f"{case}/{name}"]
        expected = rows_of_the_last_pass(expected, actual.shape)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(actual), finite)
        assert actual.dtype == np.float32
        assert np.linalg.norm(actual[finite] - expected[finite]) < 3e-6 * np.linalg.norm(expected[finite]), name


def rows_of_the_last_pass(expected: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    axis = next((axis for axis, size in enumerate(shape) if size != expected.shape[axis]), 0)
    return np.moveaxis(np.moveaxis(expected, axis, 0)[-shape[axis] :], 0, axis)


@pytest.fixture(scope="module", autouse=True)
def each_run_once() -> Iterator[None]:
    """Keep what ports with bugs noted: a case is run to see whether it shows its bug, and again to be judged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "run", cache(run))
        patch.setattr(styles, "_config", cache(styles._config))
        yield


@pytest.fixture(scope="module")
def every(each_run_once: None) -> list[Case]:
    return list(cases())


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_a_bug_shows_first_where_it_says(bug: Bug, every: list[Case]):
    for model in {case.model for case in every if case.bugs == (bug,)}:
        correct = correct_diagnosis_of(Case((bug,), model, "all"), bug)
        first_layer = [name for name in correct.made if not correct.layer or name.startswith(f"l{correct.layer}.")]
        (place,) = correct.shows
        assert place in [(bug.first_pass, name) for name in first_layer], model


def test_the_corpus_is_large_and_a_fifth_of_it_nonsense_of_one_place(every: list[Case]):
    assert sum(not bug.known for bug in BUGS.values()) >= len(BUGS) / 5
    assert len({bug for case in every for bug in case.bugs}) == len(BUGS) >= 125
    assert {case.style for case in every} == set(STYLES)
    assert BUGS.keys() >= NAMES.keys() >= VALUES.keys() | ALIKE.keys()
    assert len({case.name for case in every}) == len(every)


def test_bug_outside_the_dump_does_not_change_the_dump():
    for case in unseen():
        assert not first_shown(case.model, case.plan, case.style, run(case.model, case.plan, *case.bugs), 0.0), case


@pytest.mark.parametrize(("both", "model"), together.pairs())
def test_of_two_bugs_the_second_is_behind_the_first(both: tuple[Bug, Bug], model: str):
    case = Case(both, model, "all")
    (first,), (second,) = (correct_diagnosis_of(case, bug).shows for bug in both)
    right = [(n, key) for n, tape in enumerate(run(model, case.plan)) for key in forward_order(stage_keys(tape))]
    assert right.index(first) < right.index(second)
    assert first_shown(model, case.plan, "all", run(model, case.plan, *both), 1e-6) == [first]


@pytest.mark.parametrize("style", STYLES)
def test_what_is_written_is_read_as_the_stages_that_it_shows(style: str, tmp_path: Path):
    model = "micro-qwen2" if style == "modules" else "micro-llama"
    case = Case((), model, style)
    written, weights = run_case(case, tmp_path), open_weights(builtin_path(model))
    dump = stage_dump(
        open_raw(written.path),
        weights.config,
        mapping=written.mapping and read_mapping(written.mapping),
        ids=written.tokens and written.tokens.ids,
    )
    tapes = run(model, case.plan)
    assert dump.passes == tuple(passes_of(model, case.plan))[: 1 if style == "modules" else None]
    wanted = {(n, key): stage_keys(tape)[key] for n, tape in enumerate(tapes) for key in shown(style, model, n, tape)}
    assert dump.dumped.keys() == wanted.keys()
    for place, dumped in dump.dumped.items():
        np.testing.assert_array_equal(dumped.read(), wanted[place], str(place))
