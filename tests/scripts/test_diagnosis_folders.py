"""benchmarks/diagnosis/folders: the right readers give the goldens, and every wrong one changes what it says."""

import json
from collections import Counter

import numpy as np
import pytest

from benchmarks.diagnosis import folders
from benchmarks.diagnosis.asking import of_folder
from benchmarks.diagnosis.folder_readers import opened
from benchmarks.diagnosis.folders import FOLDER_CASES, FolderCase, folder_of, right_matrices
from llorch.diagnosis.mistakes import QUANTISED_FOLDERS
from llorch.diagnosis.search.block_hypotheses import LEFT_ALONE

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
    assert set(correct.made) == {"l0.ffn_gate", "l0.ffn_up", "l0.ffn_out"}


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
