"""`llorch dump-writer`."""

import pytest
from command_line import invoke

from llorch.cli.dump_writer import WRITERS
from tests.dumps.test_writers import WRITERS as FILES


@pytest.mark.parametrize("language", WRITERS)
def test_a_writer_is_printed_as_it_is(language: str):
    (path,) = [path for path in FILES if path.name == WRITERS[language]]
    assert invoke("dump-writer", language).stdout == path.read_text(encoding="utf-8")


def test_every_writer_can_be_had():
    assert sorted(WRITERS.values()) == [path.name for path in FILES]


def test_another_language_is_refused_with_those_there_are():
    result = invoke("dump-writer", "fortran")
    assert result.exit_code == 2
    assert "'python', 'c', 'rust', 'ggml'" in result.stderr
