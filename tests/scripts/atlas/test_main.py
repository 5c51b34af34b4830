"""`python -m benchmarks.atlas`: options, consent and missing extras, without the runs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.refusals import assert_cli_refuses

from benchmarks.atlas import catalogue
from benchmarks.atlas.__main__ import main
from benchmarks.atlas.catalogue import AtlasEngine


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="python -m benchmarks.atlas")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["mlx-ml"], ("engine 'mlx-ml'", "python -m benchmarks.atlas --list", "'mlx-lm'")),
        (["--input", "llma"], ("input 'llma'", "python -m benchmarks.atlas --list", "'llama'")),
    ],
)
def test_what_is_not_there_is_said(words: list[str], facts: tuple[str, ...]):
    assert_cli_refuses(invoke(*words), 2, *facts)


def test_names_are_listed_and_each_adapter_has_pinned_requirements():
    lines = invoke("--list").stdout.splitlines()
    assert lines[0] == "engines:"
    assert "mlx-lm" in lines
    assert "llama-theta-old" in lines
    for engine in catalogue.ENGINES:
        if not engine.why_not:
            assert len(engine.adapter.read_text().splitlines()) < 100, engine.name
            lines = engine.adapter.with_suffix(".txt").read_text().splitlines()
            pins = [line for line in lines if not line.startswith(("#", "-"))]
            assert pins
            assert all("==" in line for line in pins), engine.name


def test_script_without_yes_installs_nothing_and_is_told_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = AtlasEngine("large", "large", folder=tmp_path)
    engine.lock.write_text("# 355000000 bytes to download\n")
    monkeypatch.setattr(catalogue, "BY_NAME", {"large": engine})
    monkeypatch.setattr("benchmarks.atlas.__main__.find_spec", lambda name: object())
    words = ("large", "--input", "llama", "--home", str(tmp_path / "home"))
    assert_cli_refuses(invoke(*words), 2, "355 MB", str(tmp_path / "home"), "--yes")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("package", ["torch", "transformers", "matplotlib"])
def test_missing_extra_is_said_before_anything_is_installed(package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.atlas.__main__.find_spec", lambda name: None if name == package else object())
    monkeypatch.setattr("benchmarks.atlas.runs.run", None)
    assert_cli_refuses(invoke("--yes"), 3, package)


@pytest.mark.live
def test_an_engine_that_cannot_be_had_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalogue, "BY_NAME", {"absent": AtlasEngine("absent", "absent", why_not="no wheel for it")})
    result = invoke("absent", "--input", "llama", "--home", "home")
    assert result.exit_code == 3
    assert "NOT RUN" in result.stdout
    assert "no wheel for it" in result.stdout
    result = invoke("absent", "--input", "llama", "--home", "home", "--json")
    assert json.loads(result.stdout)["verdicts"][0]["verdict"] == "NOT RUN"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
