"""`llorch dump-writer`."""

from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses

from llorch.cli.dump_writer import WRITERS
from llorch.engines.dumps.index import open_raw
from llorch.stages.stage_ref import Tokens
from tests.engines.dumps.test_writers import WRITERS as FILES


@pytest.mark.parametrize("language", WRITERS)
def test_a_writer_is_printed_as_it_is(language: str):
    (path,) = [path for path in FILES if path.name == WRITERS[language]]
    assert invoke("dump-writer", language).stdout == path.read_text(encoding="utf-8")


def test_the_index_of_the_help_page_is_read(tmp_path: Path):
    page = invoke("dump-writer", "--help").stdout
    (tmp_path / "index.jsonl").write_text("".join(line + "\n" for line in page.splitlines() if line.strip()[:1] == "{"))
    (tmp_path / "q.bin").write_bytes(bytes(3 * 64 * 4))
    dump = open_raw(tmp_path)
    assert dump.passes == (Tokens((9, 4, 7)),)
    assert [(array.name, array.layer, array.shape) for _, array in dump.arrays] == [("q", 0, (3, 64))]


def test_every_writer_can_be_had():
    assert sorted(WRITERS.values()) == [path.name for path in FILES]


def test_another_language_is_refused_with_those_there_are():
    result = invoke("dump-writer", "fortran")
    assert_cli_refuses(result, 2, "'fortran'", "'python', 'c', 'rust', 'ggml'")
