import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.command_line import REPOSITORY
from helpers.refusals import assert_tells

from llorch.apps.doctor.machine import packages
from llorch.apps.doctor.machine.packages import (
    EXTRAS,
    NEEDED,
    check_packages,
    import_in_children,
    installed_extras,
    missing_extra,
    probe_imports,
    read_commit,
    run_probe,
    version_line,
)

Make = Callable[..., None]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Puts a package before those that are installed, here and in every process that is started."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")

    def make(name: str, version: str, source: str | None = None) -> None:
        if source is not None:
            (tmp_path / f"{name.replace('-', '_')}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return make


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = {extra: [one.partition(";")[0] for one in all] for extra, all in project["optional-dependencies"].items()}
    assert list(NEEDED) == project["dependencies"]
    assert {extra: list(all) for extra, all in EXTRAS.items()} == {
        extra: all for extra, all in wanted.items() if extra not in ("dev", "docs")
    }


@pytest.mark.parametrize(
    ("module", "extra"), [("jinja2", ""), ("rich.console", ""), ("yaml", "train"), ("llama_cpp", "golden"), ("x", None)]
)
def test_module_that_is_not_found_is_brought_by_the_first_extra_that_has_it(module: str, extra: str | None):
    missing = missing_extra(ModuleNotFoundError(name=module))
    assert (missing and missing.extra) == extra


def test_what_a_process_says_is_heard_and_what_it_prints_is_not():
    code = "print('noise'); say({'a': 1}); sys.stdout.write('half a line'); print(); say(sys.argv[1])"
    assert run_probe(code, "x", timeout=60) == ([{"a": 1}, "x"], "")


@pytest.mark.parametrize(
    ("code", "timeout", "facts"),
    [
        ("say(1); import os; os.abort()", 60, ("SIGABRT",)),
        ("say(1); raise SystemExit('no such thing')", 60, ("code 1", "no such thing")),
        ("say(1); import threading; threading.Event().wait()", 2, ("2 s",)),
    ],
)
def test_how_a_process_ends_is_said_beside_what_it_said_before(code: str, timeout: int, facts: tuple[str, ...]):
    said, why = run_probe(code, timeout=timeout)
    assert said == [1]
    assert_tells(why, *facts)


def test_a_package_that_ends_the_process_is_named_and_the_next_is_looked_at(make: Make):
    make("aborts", "1.0", "import os; os.abort()")
    make("hangs", "1.0", "import threading; threading.Event().wait()")
    make("raises", "1.0", "import sys\nsys.exit('stop')")
    make("works", "1.0", "print('hello')")
    found = import_in_children(["aborts", "raises", "hangs", "works"], timeout=3)
    assert (found["raises"], found["works"]) == ("SystemExit: stop", "")
    assert_tells(found["aborts"], "SIGABRT")
    assert_tells(found["hangs"], "3 s")


def test_broken_old_and_wrong_versions_come_with_the_command_that_repairs_them(make: Make):
    for name in ("torch", "transformers", "peft", "accelerate", "bitsandbytes"):
        make(name, "99.0", "")  # which are imported at once
    make("prometheus-client", "0.26.0", "import os; os.abort()")
    make("huggingface-hub", "0.36.2")
    make("llama-cpp-python", "0.3.2")
    with ThreadPoolExecutor() as pool:
        found = {one.name: one for one in check_packages(probe_imports(pool))}
    broken = {name: (one.text, one.repair) for name, one in found.items() if one.state == "broken"}
    assert broken.keys() == {"serve", "hub", "golden"}
    assert_tells(broken["serve"][0], "prometheus-client 0.26.0", "SIGABRT")
    assert broken["serve"][1] == "pip install --force-reinstall 'prometheus-client>=0.22'"
    assert_tells(broken["hub"][0], "huggingface-hub 0.36.2", "1.0")
    assert broken["hub"][1] == "pip install --force-reinstall 'huggingface-hub>=1.0'"
    assert_tells(broken["golden"][0], "llama-cpp-python 0.3.2", "0.3.36")
    assert (found["numpy"].state, found["torch"].text) == ("ok", "torch 99.0")


def test_missing_packages_are_absent_and_required_ones_are_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.apps.doctor.machine.packages.EXTRAS", {"more": ("there-is-none>=1", "click>=8.2")})
    monkeypatch.setattr("llorch.apps.doctor.machine.packages.NEEDED", ("nor-this-one>=2",))
    _, needed, extra = check_packages({})
    assert (needed.state, needed.repair) == ("broken", "pip install --force-reinstall 'nor-this-one>=2'")
    assert (extra.state, extra.repair) == ("absent", "pip install 'llorch[more]'")
    assert re.fullmatch(r"no there-is-none, click [\d.]+", extra.text)


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
    word, found = read_commit(package).split()
    assert (word, head[: len(found)]) == ("commit", found)
    assert len(found) >= 7
    (package / "commit.txt").write_text("changed\n")
    assert read_commit(package) == f"commit {found}-dirty"


def test_the_commit_of_an_installed_package_is_in_its_file(package: Path):
    (package / "commit.txt").write_text("abc1234\n")
    assert read_commit(package) == "commit abc1234"


def test_no_checkout_and_no_file_is_an_unknown_commit(package: Path):
    assert read_commit(package) == "unknown commit"


def test_a_checkout_without_git_is_an_unknown_commit(package: Path, monkeypatch: pytest.MonkeyPatch):
    commit(package.parent)
    monkeypatch.setenv("PATH", "")
    assert read_commit(package) == "unknown commit"


def test_an_extra_is_named_if_all_its_packages_are_there(monkeypatch: pytest.MonkeyPatch):
    there = {"torch", "yaml", "tensorboard"}
    monkeypatch.setattr(packages, "find_spec", lambda name: name if name in there else None)
    assert installed_extras() == ["torch", "tensorboard"]  # train needs matplotlib, too
    assert version_line("1.2.3").startswith("llorch 1.2.3 (")
    assert version_line("1.2.3").endswith(", extras: torch, tensorboard)")
    there.clear()
    assert version_line("1.2.3").endswith(", extras: none)")


def test_the_line_imports_no_extra():
    code = "import sys, llorch.apps.doctor.machine.packages as i; i.version_line(''); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
