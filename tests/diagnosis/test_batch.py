"""Rows of a batch are judged as runs of their own, and a finding names its rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.batches import MODEL, PROMPTS, Change, unchanged, write_padded, write_ragged
from faults.wrong_dumps import float64_weights

from llorch.diagnosis.batch import diagnose_rows
from llorch.diagnosis.guards import read_comparable, read_rows
from llorch.diagnosis.verdict import Diagnosis
from llorch.engines.dumps.index import open_raw
from llorch.runtime.errors import UserError

WRITERS = {
    "left": lambda folder, change: write_padded(folder, on_the_left=True, change=change),
    "right": lambda folder, change: write_padded(folder, on_the_left=False, change=change),
    "flat": lambda folder, change: write_padded(folder, on_the_left=True, change=change, is_flat=True),
    "ragged": write_ragged,
}


def diagnosed(folder: Path, style: str, change: Change = unchanged) -> Diagnosis:
    weights = float64_weights(MODEL)
    return diagnose_rows(weights, read_rows(WRITERS[style](folder, change), weights), model=MODEL)


@pytest.mark.parametrize("style", WRITERS)
def test_rows_of_a_right_batch_are_right(style: str, tmp_path: Path):
    weights = float64_weights(MODEL)
    rows = read_rows(WRITERS[style](tmp_path, unchanged), weights)
    assert [dump.passes[0].ids for dump in rows] == list(PROMPTS)
    assert [dump.passes[1].first_position for dump in rows] == list(map(len, PROMPTS))
    diagnosis = diagnose_rows(weights, rows)
    assert (diagnosis.findings, diagnosis.not_run) == ([], {})
    assert any("a batch of 3 rows" in note for note in diagnosis.notes)
    if style != "ragged":
        assert {"l0.k_cache", "l0.attn_scores"} <= {result.key for result in diagnosis.results if result.n_pass == 1}


@pytest.mark.parametrize(
    ("style", "wrong", "where"),
    [
        ("left", {1}, "row 2 of 3 only"),
        ("right", {0, 2}, "rows 1 and 3 of 3 only"),
        ("ragged", {0, 1, 2}, "all 3 rows"),
    ],
)
def test_finding_names_the_rows_that_show_it(style: str, wrong: set[int], where: str, tmp_path: Path):
    def change(row: int, number: int, name: str, array: np.ndarray) -> np.ndarray:
        return array * np.float32(1.5) if row in wrong and number == 0 and name == "logits" else array

    (finding,) = diagnosed(tmp_path, style, change).findings
    assert (finding.key, finding.n_pass) == ("logits", 0)
    assert finding.sentence.startswith(f"{where}: ")


def test_positions_that_count_padding_are_one_finding_with_the_value_of_each_row(tmp_path: Path):
    write_padded(tmp_path, on_the_left=True, starts=(4, 0, 2))
    weights = float64_weights(MODEL)
    (finding,) = diagnose_rows(weights, read_rows(tmp_path, weights)).findings
    assert [cause.name for cause in finding.causes] == ["rope-position-offset"]
    assert finding.sentence.startswith("rows 1 and 3 of 3 only: l0.q_rope: ")
    assert finding.sentence.endswith(" The values of these rows are 4, 2.")


def test_two_findings_of_one_name_in_a_row_stay_two(tmp_path: Path):
    def change(row: int, number: int, name: str, array: np.ndarray) -> np.ndarray:
        return array * np.float32(1.5) if row == number == 0 and name == "l1.ffn_up" else array

    findings = diagnosed(tmp_path, "ragged", change).findings  # the engine's ffn_act read the right ffn_up
    assert [finding.key for finding in findings] == ["l1.ffn_up", "l1.ffn_act"]
    assert findings[0].causes[0].name == findings[1].causes[0].name == "scaled"


def test_mapping_declares_the_batch_of_a_file_without_tokens(tmp_path: Path):
    write_padded(tmp_path / "dump", on_the_left=True)
    raw, file, mapping = open_raw(tmp_path / "dump"), tmp_path / "dump.npz", tmp_path / "names.toml"
    arrays: dict[str, Any] = {array.name: array.read() for number, array in raw.arrays if number == 0}
    np.savez(file, **arrays)
    (batch, _), weights = raw.batch, float64_weights(MODEL)
    mapping.write_text(f"[run]\nids = {[*map(list, batch.ids)]}\nattention_mask = {[*map(list, batch.masks)]}\n")
    rows = read_rows(file, weights, mapping=mapping)
    assert [dump.passes[0].ids for dump in rows] == list(PROMPTS)
    assert diagnose_rows(weights, rows).findings == []
    with pytest.raises(UserError, match="declares its tokens"):
        read_rows(tmp_path / "dump", weights, mapping=mapping)


def test_read_comparable_refuses_a_batch(tmp_path: Path):
    write_ragged(tmp_path)
    with pytest.raises(UserError, match="a batch of 3"):
        read_comparable(tmp_path, float64_weights(MODEL))
    with pytest.raises(UserError, match="the dump declares its rows"):
        read_rows(tmp_path, float64_weights(MODEL), ids=(1, 2))
