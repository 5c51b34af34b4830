"""`pytest --impl=DIR`, as it is called."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY


@pytest.mark.slow
def test_pytest_checks_an_implementation_and_nothing_else(tmp_path: Path):
    (tmp_path / "l06_swiglu.py").write_text(
        "def swiglu(gate, up):\n    return gate * up\ndef feed_forward(**given):\n    raise NotImplementedError\n"
    )
    which = "checkpoint_06- or checkpoint_04"  # not 06b
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-v", "-k", which, f"--impl={tmp_path}"],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert "2 failed, 2 skipped" in done.stdout
    assert "test_implementation[checkpoint_06-isolated] FAILED" in done.stdout
    assert "BORROWED: attention_scores, attention_probs" in done.stdout
    assert "first wrong number" in done.stdout
    assert "Traceback" not in done.stdout
