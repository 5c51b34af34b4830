"""The log of a run: what two equal runs have in common in one file, wall times in another."""

import json
from pathlib import Path

import pytest

STEP = {"step": 1, "loss": 1 / 3, "norm": 0.1}


def write(folder: Path, *records: dict, offset: int = 0) -> int:
    from llorch.train.log import RunLog

    with RunLog(folder, offset=offset, tensorboard=False) as log:
        for record in records:
            if "valid_loss" in record:
                log.validation(record)
            else:
                log.step(record, seconds=0.25)
        return log.synced()


def test_numbers_are_read_back_to_the_last_bit(tmp_path: Path):
    from llorch.train.log import read_log

    write(tmp_path, STEP, {"step": 1, "valid_loss": 2 / 7})
    assert read_log(tmp_path / "log.jsonl") == [STEP, {"step": 1, "valid_loss": 2 / 7}]


def test_wall_times_are_kept_apart(tmp_path: Path):
    write(tmp_path, STEP)
    assert "seconds" not in (tmp_path / "log.jsonl").read_text()
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
    from llorch.errors import FormatError

    offset = write(tmp_path, STEP)
    with pytest.raises(FormatError, match=f"Truncated: log: the snapshot was taken at byte {offset + 1}"):
        write(tmp_path, offset=offset + 1)


def test_nan_is_no_json_and_never_written(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path, STEP | {"loss": float("nan")})


@pytest.mark.parametrize("line", ['{"step": 1', "[1]", '{"loss": 1}'])
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str):
    from llorch.errors import FormatError
    from llorch.train.log import read_log

    write(tmp_path, STEP)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError, match="line 2"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.live
def test_tensorboard_reads_the_same_numbers(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from llorch.train.log import RunLog

    with RunLog(tmp_path, offset=0, tensorboard=True) as log:
        log.step(STEP, seconds=0.5)
        log.validation({"step": 1, "valid_loss": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "norm", "valid_loss"]
    assert [(one.step, one.value) for one in events.Scalars("valid_loss")] == [(1, 0.75)]
