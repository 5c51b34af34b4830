"""benchmarks/diagnosis: the port without its bugs is right, and every bug changes the stage that it names."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.diagnosis import cases as corpus
from benchmarks.diagnosis import folders, styles
from benchmarks.diagnosis.asking import of_folder
from benchmarks.diagnosis.bugs import BUGS, Bug, together
from benchmarks.diagnosis.cases import Case, cases, correct_diagnosis_of, first_shown, passes_of, run, run_case, unseen
from benchmarks.diagnosis.expected import ALIKE, NAMES, VALUES
from benchmarks.diagnosis.folder_readers import opened
from benchmarks.diagnosis.folders import FOLDER_CASES, FolderCase, folder_of, right_matrices
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import STYLES, list_dumped_keys, stage_keys
from llorch.diagnosis.mistakes import QUANTISED_FOLDERS
from llorch.diagnosis.search.block_hypotheses import LEFT_ALONE
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
        expected = rows_of_the_last_pass(correct[f"{case}/{name}"], actual.shape)
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
        first_layer = [name for name in correct.starts_in if not correct.layer or name.startswith(f"l{correct.layer}.")]
        (place,) = correct.shows
        assert place in [(bug.first_pass, name) for name in first_layer], model


def test_the_corpus_is_large_and_a_fifth_of_it_nonsense_of_one_place(every: list[Case]):
    assert sum(not bug.is_known for bug in BUGS.values()) >= len(BUGS) / 5
    assert len({bug for case in every for bug in case.bugs}) == len(BUGS) >= 125
    assert {case.style for case in every} == set(STYLES)
    assert BUGS.keys() >= NAMES.keys() >= VALUES.keys() | ALIKE.keys()
    assert len({case.name for case in every}) == len(every)


def test_bug_outside_the_dump_does_not_change_the_dump():
    for case in unseen():
        assert not first_shown(case.model, case.plan, case.style, run(case.model, case.plan, *case.bugs), 0.0), case


@pytest.mark.parametrize(("bugs", "model"), together.pairs())
def test_second_of_two_bugs_is_after_the_first(bugs: tuple[Bug, Bug], model: str):
    case = Case(bugs, model, "all")
    (first,), (second,) = (correct_diagnosis_of(case, bug).shows for bug in bugs)
    right = [(n, key) for n, tape in enumerate(run(model, case.plan)) for key in forward_order(stage_keys(tape))]
    assert right.index(first) < right.index(second)
    assert first_shown(model, case.plan, "all", run(model, case.plan, *bugs), 1e-6) == [first]


@pytest.mark.parametrize("style", STYLES)
def test_written_dump_is_read_as_its_stages(style: str, tmp_path: Path):
    model = "micro-qwen2" if style == "modules" else "micro-llama"
    case = Case((), model, style)
    written, weights = run_case(case, tmp_path), open_weights(builtin_path(model))
    mapping, ids = written.mapping and read_mapping(written.mapping), written.tokens and written.tokens.ids
    dump = stage_dump(open_raw(written.path), weights.config, mapping=mapping, ids=ids)
    tapes = run(model, case.plan)
    assert dump.passes == tuple(passes_of(model, case.plan))[: 1 if style == "modules" else None]
    wanted = {
        (n, key): stage_keys(tape)[key]
        for n, tape in enumerate(tapes)
        for key in list_dumped_keys(style, model, n, tape)
    }
    assert dump.dumped.keys() == wanted.keys()
    for place, dumped in dump.dumped.items():
        np.testing.assert_array_equal(dumped.read(), wanted[place], str(place))


GOLDENS = json.loads((folder_of("goldens.json")).read_text())
WRONG = [case for case in FOLDER_CASES if case.wrong]
MISSED = {  # what is not found, by names that would be right and folder
    ("folder-codes-signed", "gptq-8bit"): ["name"],  # signed, and no zero point: two known mistakes at once
    ("left-alone-module-quantised", "bnb-int8"): ["name"],  # many weights lie between two codes
}
PLAIN = ("awq-plain-order", "left-alone-module-quantised")


@pytest.mark.parametrize("name", sorted({case.folder for case in FOLDER_CASES}))
def test_right_reader_gives_the_numbers_of_the_goldens(name: str):
    made, wanted = right_matrices(name), GOLDENS[name]["weights"]
    assert made.keys() == wanted.keys()
    for weight, golden in wanted.items():
        flat = made[weight].reshape(-1)
        places = np.linspace(0, flat.size - 1, len(golden["samples"])).astype(int)
        np.testing.assert_allclose(flat[places], golden["samples"], rtol=2e-7, atol=0, err_msg=weight)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_wrong_reader_changes_matrices(case: FolderCase):
    assert case.wrong
    made, right = case.wrong(opened(folder_of(case.folder))), right_matrices(case.folder)
    assert made.keys() >= right.keys()
    changed = [name for name in right if not np.allclose(made[name], right[name], rtol=1e-4, atol=0)]
    assert changed or made.keys() - right.keys() == {"lm_head.weight"}


def test_cases_are_many_and_name_known_mistakes():
    assert len(WRONG) > 30
    assert len(FOLDER_CASES) - len(WRONG) > 10
    assert sum(not case.names for case in WRONG) > 4
    known = {LEFT_ALONE, *(mistake.name for mistake in QUANTISED_FOLDERS)}
    assert {name for case in WRONG for name in case.names} <= known
    assert max(Counter((case.name, case.folder) for case in FOLDER_CASES).values()) == 1


def test_bug_shows_in_the_first_product_of_a_wrong_matrix():
    case = next(case for case in WRONG if case.names == ("fp8-blocks-of-equal-size",))
    correct = folders.correct_diagnosis_of_folder(case)
    assert correct.shows[-1] == (0, "l0.ffn_gate")
    assert set(correct.starts_in) == {"l0.ffn_gate", "l0.ffn_up", "l0.ffn_out"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if {*case.names} & {*PLAIN} else pytest.mark.nightly) for case in FOLDER_CASES],
    ids=lambda case: f"{case.name}, {case.folder}",
)
def test_diagnosis_of_folder_case_is_right(case: FolderCase):
    answer = of_folder(case)
    missed = [criterion for criterion, is_right in answer.right.items() if not is_right]
    known = {criterion for name in case.names for criterion in MISSED.get((name, case.folder), [])}
    assert {*missed} == known, (answer.said, answer.expected)
