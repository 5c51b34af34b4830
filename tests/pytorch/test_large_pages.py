"""Weights in pages of 2 MB: the same numbers, in memory that asks for such pages."""

import mmap
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from builders.quantised_folders import FOLDERS

from llorch.pytorch import large_pages
from llorch.pytorch.kernels.quantised_linear import PackedMatrix
from llorch.pytorch.large_pages import LargePages
from llorch.pytorch.model import load_torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")


def asks_for_large_pages(address: int) -> bool:
    """Look for the flag of MADV_HUGEPAGE in what Linux says of the memory at an address."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(side, 16) for side in first.split("-"))
            within = start <= address < end
        elif within and first == "VmFlags:":
            return "hg" in rest
    return False


def test_copies_are_equal_and_lie_in_large_pages():
    fields = {
        "codes": torch.arange(1 << 16).to(torch.uint8).view(256, 256),
        "d": torch.rand(256, 64),
        "few": torch.rand(3),
    }
    made = LargePages().copied(fields)
    assert all(torch.equal(made[name], field) and made[name].dtype is field.dtype for name, field in fields.items())
    assert [asks_for_large_pages(made[name].data_ptr()) for name in ("codes", "d")] == [True, True]
    assert made["few"] is fields["few"]


def test_tensors_do_not_overlap_and_a_full_chunk_is_followed_by_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_pages, "_CHUNK", 1 << 20)
    pages, wanted = (
        LargePages(),
        [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (700_001, 300_003, 1 << 21, 99_999)],
    )
    made = [pages.copied({"codes": codes})["codes"] for codes in wanted]
    assert all(torch.equal(ours, codes) for ours, codes in zip(made, wanted, strict=True))
    ends = sorted((ours.data_ptr(), ours.data_ptr() + len(ours)) for ours in made)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_tensor_that_is_made_in_large_pages_is_not_copied():
    pages = LargePages()
    codes = pages.empty(300, 256, dtype=torch.uint8)
    assert (codes.shape, codes.dtype, asks_for_large_pages(codes.data_ptr())) == ((300, 256), torch.uint8, True)
    made = pages.copied({"codes": codes, "d": torch.ones(300, 64)})
    assert made["codes"] is codes
    codes.fill_(7)
    assert bool((made["d"] == 1).all())


def test_memory_is_freed_with_the_last_tensor_in_it():
    (made,) = LargePages().copied({"codes": torch.ones(1 << 20)}).values()
    address = made.data_ptr()
    assert asks_for_large_pages(address)
    del made
    assert not asks_for_large_pages(address)


def test_a_system_without_large_pages_keeps_the_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    codes = torch.ones(1 << 20)
    assert LargePages().copied({"codes": codes})["codes"] is codes
    assert LargePages().empty(1 << 20, dtype=torch.uint8).shape == (1 << 20,)


def test_a_process_without_memory_keeps_the_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_pages, "_CHUNK", 1 << 60)
    codes = torch.ones(1 << 20)
    assert LargePages().copied({"codes": codes})["codes"] is codes


def test_packed_matrices_of_a_folder_lie_in_large_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_pages, "_LEAST", 0)
    module = load_torch(FOLDERS / "mlx-4bit", residency="packed", dtype="bfloat16").module
    codes = [one.get_buffer("codes") for one in module.modules() if isinstance(one, PackedMatrix)]
    assert codes
    assert all(asks_for_large_pages(field.data_ptr()) for field in codes)


def test_codes_of_a_whole_matrix_are_packed_where_they_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_pages, "_LEAST", 0)
    copies: list[torch.Tensor] = []
    copied = LargePages._copied

    def noted(pages: LargePages, tensor: torch.Tensor) -> torch.Tensor:
        made = copied(pages, tensor)
        if made is not tensor:
            copies.append(made)
        return made

    monkeypatch.setattr(LargePages, "_copied", noted)
    module = load_torch(FOLDERS / "mlx-4bit", residency="packed", dtype="bfloat16").module
    codes = {one.get_buffer("codes").data_ptr() for one in module.modules() if isinstance(one, PackedMatrix)}
    assert copies
    assert codes.isdisjoint(tensor.data_ptr() for tensor in copies)
