"""The log of a run: what two equal runs have in common in one file, wall times in another."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.command_line import REPOSITORY
from helpers.refusals import refuses

from llorch.training.log import RunLog, draw_curve, read_log

STEP = {"step": 1, "loss": 1 / 3, "norm": 0.1}


def write(folder: Path, *records: dict, offset: int = 0) -> int:
    with RunLog(folder, offset=offset, tensorboard=False) as log:
        for record in records:
            if "valid_loss" in record:
                log.validation(record)
            else:
                log.step(record, seconds=0.25)
        return log.synced()


def test_numbers_are_read_back_to_the_last_bit_and_wall_times_are_kept_apart(tmp_path: Path):
    write(tmp_path, STEP, {"step": 1, "valid_loss": 2 / 7})
    assert read_log(tmp_path / "log.jsonl") == [STEP, {"step": 1, "valid_loss": 2 / 7}]
    assert json.loads((tmp_path / "timing.jsonl").read_text()) == {"step": 1, "seconds": 0.25}


def test_lines_behind_the_offset_of_a_snapshot_are_written_again(tmp_path: Path):
    offset = write(tmp_path, STEP)
    write(tmp_path, STEP | {"step": 2}, offset=offset)
    whole = (tmp_path / "log.jsonl").read_bytes()
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo')  # killed while it wrote
    write(tmp_path, STEP | {"step": 2}, offset=offset)
    assert (tmp_path / "log.jsonl").read_bytes() == whole


def test_a_log_shorter_than_the_snapshot_says_is_refused(tmp_path: Path):
    offset = write(tmp_path, STEP)
    with refuses("Truncated", offset + 1, where="log"):
        write(tmp_path, offset=offset + 1)


def test_nan_is_no_json_and_never_written(tmp_path: Path):
    with refuses(ValueError, "JSON"):
        write(tmp_path, STEP | {"loss": float("nan")})


@pytest.mark.parametrize("line", ['{"step": 1', "[1]", '{"loss": 1}'])
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str):
    write(tmp_path, STEP)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    with refuses("Malformed", "line", 2):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.live
def test_tensorboard_reads_the_same_numbers(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, offset=0, tensorboard=True) as log:
        log.step(STEP, seconds=0.5)
        log.validation({"step": 1, "valid_loss": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "norm", "valid_loss"]
    assert [(one.step, one.value) for one in events.Scalars("valid_loss")] == [(1, 0.75)]


RECORDS = [
    {"step": 0, "valid_loss": 3.0},
    {"step": 1, "loss": 2.5},
    {"step": 2, "loss": 2.0},
    {"step": 2, "valid_loss": 2.2},
]
DRAW = """
import sys
from pathlib import Path
from llorch.training.log import draw_curve
draw_curve(eval(sys.argv[1]), Path(sys.argv[2]), title="story on pirate")
"""


def draw(path: Path, records: list) -> bytes:
    draw_curve(records, path, title="story on pirate")
    return path.read_bytes()


def test_the_curve_shows_training_and_validation(tmp_path: Path):
    tree = ElementTree.fromstring(draw(tmp_path / "curve.svg", RECORDS))
    texts = {"".join(element.itertext()).strip() for element in tree.iter() if element.tag.endswith("}text")}
    assert {"training", "validation", "story on pirate", "optimizer step"} <= texts


def test_draw_curve_of_equal_records_at_another_time_gives_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    first = draw(tmp_path / "a.svg", RECORDS)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "2")
    assert draw(tmp_path / "b.svg", RECORDS) == first != draw(tmp_path / "c.svg", RECORDS[:-1])


@pytest.mark.slow
def test_the_curve_depends_on_the_log_alone_in_another_process_too(tmp_path: Path):
    other = tmp_path / "other.svg"
    subprocess.run([sys.executable, "-c", DRAW, repr(RECORDS), str(other)], check=True, cwd=REPOSITORY)
    assert draw(tmp_path / "curve.svg", RECORDS) == other.read_bytes() != draw(tmp_path / "b.svg", RECORDS[:-1])
    assert b"<svg" in draw(tmp_path / "empty.svg", [])
