"""File operations of snapshots as the system does them."""

import os
from pathlib import Path

import pytest
from faulty_disk import FAULTS, FaultyDisk, StutteringDisk

from llorch.train.disk import Disk, remove_tree, write_new_file


def test_a_file_has_all_parts_in_order(tmp_path: Path):
    for name, disk in (("a", Disk()), ("b", StutteringDisk())):
        write_new_file(disk, tmp_path / name, [b"first, ", memoryview(b"second, "), b"", b"third"])
        assert (tmp_path / name).read_bytes() == b"first, second, third"


def test_a_file_that_exists_is_not_written_over(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_new_file(Disk(), tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"old"


def test_no_descriptor_stays_open_when_a_write_fails(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    for at in (2, 3):
        with pytest.raises(OSError, match="injected"):
            write_new_file(FaultyDisk(FAULTS[0], at), tmp_path / str(at), [b"x"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_is_removed_with_its_files(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    remove_tree(Disk(), tmp_path / "a")
    assert Disk().names(tmp_path) == []
