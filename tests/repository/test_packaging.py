"""pyproject.toml, the wheel and CHANGELOG.md describe the package; the site needs only the extra docs."""

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from helpers.command_line import invoke
from helpers.only_extra import blocked_by, run_with
from helpers.refusals import assert_tells

import llorch
from llorch.apps.learn.choice import Implementation
from llorch.apps.learn.lessons import BY_NUMBER, LESSONS
from llorch.apps.learn.sandbox import _check_in_sandbox
from llorch.judging.goldens.store import GoldenStore
from llorch.judging.verify import stored
from llorch.runtime.builtin import GOLDENS_IN_WHEEL, IN_WHEEL, goldens_folder
from llorch.stages.comparison import NOT_RUN, PASS
from tests.apps.doctor.machine.test_packages import commit

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = [file.read_text() for file in (ROOT / "llorch").rglob("*.py")]
ONE_CASE = SETTINGS["tool"]["hatch"]["build"]["hooks"]["custom"]["one-case"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_each_extra_is_asked_for_by_a_message_or_makes_nothing_but_haste_or_is_for_developers():
    asked = {extra for source in SOURCES for extra in re.findall(r"MissingExtra\(['\"](\w+)", source)}
    assert asked | {"learn"} | {"dev", "docs"} == EXTRAS.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked wheel, beside the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    (made,) = WheelBuilder(str(ROOT)).build(directory=str(folder))
    with ZipFile(made) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_stays_under_20_mb(wheel: Path):
    (made,) = wheel.parent.glob("*.whl")
    assert 10_000_000 < made.stat().st_size < 20_000_000


NOT_IN_WHEEL = re.compile(
    r"[^/]*\.(py|css)|.*\.svg|(generated|how_to|mesh)/.*|.*/(PORTING\.md|(figures|lesson|porting)\.py)"
)


def test_the_wheel_holds_the_dense_models_with_forward_goldens_and_the_lessons(wheel: Path):
    package = wheel / "llorch"
    assert names(package / "models") == {"provenance.json", *(f"{name}.gguf" for name in IN_WHEEL)}
    files = ("golden.json", *(f"{kind}.safetensors.xz" for kind in ("llamacpp", "transformers", "truth")))
    assert names(package / "reference_outputs") == {f"{name}/{file}" for name in GOLDENS_IN_WHEEL for file in files}
    sources = {path for path in names(ROOT / "checkpoints") if "__pycache__" not in path}
    assert names(package / "checkpoints") == {path for path in sources if not NOT_IN_WHEEL.fullmatch(path)}
    for lesson in LESSONS:
        folder = package / lesson.folder.relative_to(ROOT)
        assert {"stub.py", "hints.toml", "mistakes.py"} <= names(folder), lesson.number
    code = {name for name in names(ROOT / "llorch") if "__pycache__" not in name and not name.startswith("models/")}
    assert code <= names(package)


def test_the_sdist_holds_every_model_golden_and_lesson_and_what_builds_it():
    held = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    for folder in ("llorch/models", "benchmarks", "reference_outputs", "checkpoints", "tests", ".ci"):
        files = {f"{folder}/{name}" for name in names(ROOT / folder) if "__pycache__" not in name}
        assert files - held == set(), folder
    assert {"pyproject.toml", "constraints.txt"} <= held


@pytest.mark.parametrize("target", [WheelBuilder, SdistBuilder])
def test_a_build_from_a_checkout_names_its_commit(target: type[WheelBuilder] | type[SdistBuilder], tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "llorch"\nversion = "1"\n[tool.hatch.build.hooks.custom]\npath = "hook.py"\n'
    )
    (tmp_path / "llorch").mkdir()
    (tmp_path / "llorch/__init__.py").touch()
    (tmp_path / "hook.py").write_text((ROOT / ".ci/hatch_build.py").read_text())
    head = commit(tmp_path)
    (made,) = target(str(tmp_path)).build(directory=str(tmp_path / "dist"))
    shutil.unpack_archive(made, tmp_path / "out", "zip" if made.endswith(".whl") else "gztar")
    (file,) = (tmp_path / "out").rglob("commit.txt")
    assert head.startswith(file.read_text().strip())
    assert file.parent.name == "llorch"


@pytest.mark.usefixtures("installed")
def test_the_wheel_has_one_case_of_the_goldens_of_some_models():
    cases = {model: [*stored(model)[1].cases] for model in GOLDENS_IN_WHEEL}
    assert cases == {model: ["near"] if model in ONE_CASE else ["far", "near"] for model in GOLDENS_IN_WHEEL}
    for model in ONE_CASE:
        for name, arrays in GoldenStore(goldens_folder() / model).arrays(["llamacpp", "truth"]).items():
            whole = GoldenStore(ROOT / "reference_outputs" / model).arrays([name])[name]
            assert arrays.keys() == {key for key in whole if key.startswith("near/")}
            assert all(np.array_equal(array, whole[key]) for key, array in arrays.items())


@pytest.fixture
def installed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look for models and goldens in the unpacked wheel; lessons read them again, as they do after the test."""
    monkeypatch.setattr("llorch.runtime.builtin._PACKAGE", wheel / "llorch")
    forget_what_lessons_read()
    yield
    forget_what_lessons_read()


def forget_what_lessons_read() -> None:
    """Empty the caches of the functions below `llorch.apps.learn`: an earlier test leaves no model or golden there."""
    for name, module in list(sys.modules.items()):
        if name.startswith("llorch.apps.learn."):
            for each in vars(module).values():
                if hasattr(each, "cache_clear"):
                    each.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_verify_in_a_wheel_judges_what_it_holds_and_one_line_tells_how_to_get_the_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.cli.verify_plan.GOLDENS_IN_WHEEL", ("micro-llama3",))  # the others: .ci/installed
    result = invoke("verify")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"1 model, ([\d,]{3,}) of \1 comparisons PASS;", result.stdout)
    (note,) = [line for line in result.stderr.splitlines() if line.startswith("note:")]
    assert_tells(note, "wheel", "micro-llama3", "sdist", "clone", "pip install -e")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "command",
    ["verify micro-mistral", "verify quantised", "run micro-smollm3", "verify story", "learn inputs 13 -o a.npz",
     "learn inputs 17 -o a.npz", "learn inputs 05b -o a.npz"],
)  # fmt: skip
def test_wheel_tells_in_a_line_how_to_get_missing_files(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*command.split())
    assert result.exit_code == 3
    (line,) = [line for line in result.output.splitlines() if "sdist" in line]
    assert_tells(line, "wheel", "clone", "pip install -e")


def test_the_newest_version_of_the_changelog_is_that_of_the_package():
    assert re.findall(r"^## (\S+)", CHANGELOG, re.MULTILINE)[0] == llorch.__version__


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("number", "word"),
    [
        *((each, PASS) for each in ("00w", "01", "01b", "02", "12")),
        *((each, NOT_RUN) for each in ("05b", "06b", "13", "17")),
    ],
)
def test_wheel_lesson_without_goldens_is_not_run_and_others_pass(number: str, word: str):
    written = {exercise.name: exercise.reference for exercise in BY_NUMBER[number].parts}
    outcome = _check_in_sandbox(number, Implementation("the reference", written), "isolated", with_faults=False)
    assert (outcome.label, "sdist" in outcome.record["reason"]) == (word, word == NOT_RUN)


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
