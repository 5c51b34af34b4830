"""The site is built with the packages of the extra docs, and with no other that happens to be installed."""

from pathlib import Path

import pytest
from helpers.only_extra import blocked_by, run_with

NAMES = """
import sys
sys.path.insert(0, ".")
from checkpoints.reference import commands, names
print(len(names()), len(commands()))
"""


def test_packages_of_other_extras_are_blocked():
    blocked = blocked_by("docs")
    assert not {"click", "numpy", "torch"} & {*blocked}
    assert {*blocked} & {"pytest", "ruff", "_pytest"}


@pytest.mark.slow
def test_reference_pages_need_no_package_beyond_docs():
    done = run_with("docs", NAMES)
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 10_000


@pytest.mark.slow
def test_site_is_built_with_the_packages_of_docs(site: Path):
    assert (site / "README.html").is_file() or (site / "index.html").is_file()
