"""Files for the host of the repository: workflows, issue forms, SECURITY.md and CITATION.cff."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import llorch

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
FORMS = {path.stem: path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"}
NOT_RUN = "NOT RUN: {} is not installed; pip install -c constraints.txt -e '.[dev]'"
SCHEMAS = [
    *(("github-workflows", path) for path in WORKFLOWS.values()),
    *(("github-issue-forms", path) for path in FORMS.values()),
    ("github-issue-config", ROOT / ".github/ISSUE_TEMPLATE/config.yml"),
    ("citation-file-format", ROOT / "CITATION.cff"),
]


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(name: str) -> dict[str, dict[str, Any]]:
    return read(WORKFLOWS[name])["jobs"]


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def valid(schema: str, path: Path) -> bool:
    reason = NOT_RUN.format("check-jsonschema")
    main = pytest.importorskip("check_jsonschema.cli.main_command", reason=reason).main
    return CliRunner().invoke(main, ["--builtin-schema", f"vendor.{schema}", str(path)]).exit_code == 0


def zizmor(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("zizmor")
    if not program.exists():
        pytest.skip(NOT_RUN.format("zizmor"))
    command = [str(program), "--offline", "--no-progress", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("schema", "path"), SCHEMAS, ids=lambda value: getattr(value, "name", value))
def test_a_file_is_valid(schema: str, path: Path):
    assert valid(schema, path)


def test_an_unknown_key_of_a_workflow_is_seen(tmp_path: Path):
    (path := tmp_path / "w.yml").write_text(WORKFLOWS["tests"].read_text().replace("runs-on:", "runs-in:"))
    assert not valid("github-workflows", path)


def test_zizmor_finds_nothing():
    done = zizmor(ROOT / ".github/workflows")
    assert done.returncode == 0, done.stdout


def test_zizmor_sees_an_action_that_is_not_pinned(tmp_path: Path):
    text = WORKFLOWS["tests"].read_text()
    (tmp_path / "w.yml").write_text(re.sub(r"actions/checkout@\w+ # \S+", "actions/checkout@v4", text))
    assert zizmor(tmp_path).returncode != 0


def test_linux_tests_three_versions_of_python_and_other_systems_may_fail():
    linux, elsewhere = jobs("tests")["linux"], jobs("tests")["elsewhere"]
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert linux["strategy"]["matrix"]["python"] == re.findall(r"Python :: (3\.\d+)\"", classifiers)
    assert not linux.get("continue-on-error")
    assert "pytest" in commands(linux)
    assert elsewhere["strategy"]["matrix"]["system"] == ["macos-latest", "windows-latest"]
    assert elsewhere["continue-on-error"]
    assert "may fail" in elsewhere["name"]
    assert "may fail" in commands(elsewhere)


def test_all_checks_run_every_night_and_a_release_is_checked_as_it_is_installed():
    assert "schedule" in read(WORKFLOWS["nightly"])[True]  # YAML 1.1 reads the key on as true
    assert ".ci/run nightly" in commands(jobs("nightly")["everything"])
    built = commands(jobs("release")["build"])
    loop = r"for file in dist/\*; do \.ci/installed \"\$file\" (\S+) numpy; done"  # the wheel and the sdist
    assert re.findall(loop, built) == ["3.11", "3.12", "3.13"]


def test_nightly_published_job_runs_every_part_of_the_table_with_existing_scripts():
    run = commands(jobs("nightly")["published"])
    scripts = re.findall(r"python (\S+\.py)", run)
    assert "benchmarks/published.py" in scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    looped, single = re.findall(r"printf -- '--only %s ' ([\w ]+)\)", run), re.findall(r"--only ([a-z]+)", run)
    (names,) = re.findall(r"(?ms)^NAMES = \((.*?)^\)", (ROOT / "benchmarks/published.py").read_text())
    assert [*" ".join(looped).split(), *single] == re.findall(r'"(\w+)"', names)


def test_a_report_of_wrong_text_asks_for_the_diagnosis():
    required = {
        field["id"]: field
        for field in read(FORMS["wrong_text"])["body"]
        if field.get("validations", {}).get("required")
    }
    assert "llorch diagnose" in required["diagnose"]["attributes"]["label"]
    assert "llorch --version" in required["version"]["attributes"]["label"]


def test_the_citation_names_the_version():
    assert read(ROOT / "CITATION.cff")["version"] == llorch.__version__
