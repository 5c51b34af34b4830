"""A comparison reads blocks of rows: its memory does not grow with the size of the files."""

import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from builders.converter import convert
from builders.source_folders import write_source

from llorch.files import open_weights
from llorch.judging.source.compare import compare_with_source

MOST = {
    None: 100 << 20,
    "gate and up exchanged": 200 << 20,
}  # by mistake: bytes above the mapped files, with two threads


def peak_of_comparison(file_path: Path, source_path: Path) -> tuple[int, int]:
    """Return the largest number of allocated bytes during a comparison, and the number of failures."""
    file, source = open_weights(file_path), open_weights(source_path)
    with closing(file.source), closing(source.source):
        tracemalloc.start()
        try:
            report = compare_with_source(file, source, model="file", n_threads=2)
            return tracemalloc.get_traced_memory()[1], len(report.failures)
        finally:
            tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.nightly_cases(but=["None"])
@pytest.mark.parametrize("mistake", MOST)
def test_comparison_of_large_files_needs_memory_for_some_rows_only(tmp_path: Path, mistake: str | None):
    source = write_source(tmp_path / "source", "llama", width=2048, vocabulary=False)
    file = convert(source, tmp_path / "file.gguf", mistake, kind="Q8_0")
    assert file.stat().st_size + (source / "model.safetensors").stat().st_size > 200 << 20
    peak, n_failures = peak_of_comparison(file, source)
    assert n_failures == (4 if mistake else 0)
    assert peak < MOST[mistake], f"{peak / 2**20:.0f} MiB"
