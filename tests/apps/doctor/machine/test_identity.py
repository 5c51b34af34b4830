"""The line of `llorch --version`."""

import subprocess
import sys
from pathlib import Path

import pytest

from llorch.apps.doctor.machine import identity
from llorch.apps.doctor.machine.identity import commit_of, installed_extras, version_line


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (package := tmp_path / "llorch").mkdir()
    return package


def commit(folder: Path) -> str:
    git = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-C", str(folder))
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "--allow-empty", "-m", "m")):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_checkout_is_that_of_git_and_a_change_shows(package: Path):
    (package / "commit.txt").write_text("0000000\n")  # of another build
    head = commit(package.parent)
    word, found = commit_of(package).split()
    assert (word, head[: len(found)]) == ("commit", found)
    assert len(found) >= 7
    (package / "commit.txt").write_text("changed\n")
    assert commit_of(package) == f"commit {found}-dirty"


def test_the_commit_of_an_installed_package_is_in_its_file(package: Path):
    (package / "commit.txt").write_text("abc1234\n")
    assert commit_of(package) == "commit abc1234"


def test_no_checkout_and_no_file_is_an_unknown_commit(package: Path):
    assert commit_of(package) == "unknown commit"


def test_a_checkout_without_git_is_an_unknown_commit(package: Path, monkeypatch: pytest.MonkeyPatch):
    commit(package.parent)
    monkeypatch.setenv("PATH", "")
    assert commit_of(package) == "unknown commit"


def test_an_extra_is_named_if_all_its_packages_are_there(monkeypatch: pytest.MonkeyPatch):
    there = {"torch", "yaml", "tensorboard"}
    monkeypatch.setattr(identity, "find_spec", lambda name: name if name in there else None)
    assert installed_extras() == ["torch", "tensorboard"]  # train needs matplotlib, too
    assert version_line("1.2.3").startswith("llorch 1.2.3 (")
    assert version_line("1.2.3").endswith(", extras: torch, tensorboard)")
    there.clear()
    assert version_line("1.2.3").endswith(", extras: none)")


def test_the_line_imports_no_extra():
    code = "import sys, llorch.apps.doctor.machine.identity as i; i.version_line(''); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
