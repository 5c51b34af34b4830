"""The web site, which takes long to build, for all tests that look at it."""

from pathlib import Path

import pytest
from helpers.only_extra import run_with

BUILD = "import runpy, sys; sys.argv[0] = 'checkpoints/build.py'; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once, with the packages of the extra docs only."""
    pytest.importorskip(
        "sphinx", reason="NOT RUN: sphinx is not installed; pip install -c constraints.txt -e '.[docs]'"
    )
    out = tmp_path_factory.mktemp("site")
    done = run_with("docs", BUILD, "--site", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    return out
