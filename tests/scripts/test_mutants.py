"""The measure of the tests: every source file has an area, rules change what they say, fates are told apart."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.refusals import assert_tells, refuses

from benchmarks import mutants, mutation_areas
from benchmarks.mutants import Mutant, Result, Tree, drawn, main
from benchmarks.mutation_areas import AREAS, ROOT, Area
from benchmarks.mutations import edits


def test_every_source_file_is_in_one_area_and_every_area_has_guards():
    files = Counter(file for area in AREAS for file in area.files())
    assert files == Counter(file.relative_to(ROOT) for file in (ROOT / "llorch").rglob("*.py"))
    assert all(area.tests() for area in AREAS)


def test_a_pattern_without_a_file_is_refused():
    with refuses(ValueError, where="tests/test_nothing.py", got="none"):
        Area("x", "ops/*", "nothing").tests()


@pytest.mark.parametrize(
    ("source", "rule", "mutants"),
    [
        ("a < b <= c", "comparison", {"a <= b <= c", "a < b < c"}),
        ("a is None or b", "and/or", {"a is None and b"}),
        ("not a", "not left out", {"a"}),
        ("(a + b) * c", "arithmetic", {"(a - b) * c", "(a + b) / c"}),
        ("x += 1", "arithmetic", {"x -= 1"}),
        ("x[-1]", "last is first", {"x[0]"}),
        ("x[0]", "first is last", {"x[-1]"}),
        ("x[a:b]", "slice without its upper", {"x[a:]"}),
        ("f(a, axis=1)", "axis= left out", {"f(a)"}),
        ("f(a, b, 1)", "arguments swapped", {"f(b, a, 1)"}),
        ("max(a, b)", "max", {"min(a, b)"}),
        ("f(1, 64, True)", "constant", {"f(2, 64, True)", "f(1, 128, True)"}),
        ("f(True)", "truth value", {"f(False)"}),
        ("a if b else c", "branches swapped", {"c if b else a"}),
        ("('a', 'b')", "'a' left out", {"('b',)"}),
        ("{'a': 1, 'b': 2}", "'b' left out", {"{'a': 1}"}),
        ("if a:\n    raise E('no')", "statement left out", {"pass", "if a:\n    pass"}),
        ("for x in y:\n    f(x)", "loop ends after the first", {"for x in y:\n    f(x)\n    break"}),
        ("'é'; x.y = 1", "statement left out", {"'é'; pass"}),
    ],
)
def test_a_rule_makes_one_place_wrong(source: str, rule: str, mutants: set[str]):
    assert {edit.apply(source) for edit in edits(source) if edit.rule == rule} == mutants


@pytest.mark.parametrize(
    "source",
    [
        '"""Text with 1."""\nimport a\nfrom b import c',
        "def f(x: Float[A, '3'] | None) -> tuple[int, 3]: ...",
        "__all__ = ['a', 'b']\nEither = int | str",
        "if TYPE_CHECKING:\n    x = 1",
        "assert x == 1, 'one'",
        "f'{x + 1}'",
        "y = isinstance(x, A | B)",
        "@option(help='a' 'b')\ndef f(): ...",
    ],
)
def test_code_without_effect_is_not_mutated(source: str):
    assert [edit.rule for edit in edits(source) if edit.rule != "help= left out"] == []


SOURCE = """TABLE = {'a': 1, 'b': 2}
LIMIT = TABLE['b']
def near(x):
    return x < LIMIT
def unseen(x):
    return not x
"""
TEST = """from llorch.thing import near
def test_near():
    assert near(1) and not near(2)
"""
PLUGINS = """[pytest]
addopts = --assert=plain -p xdist.plugin -p no:faulthandler -p no:junitxml -p no:doctest -p no:unittest -p no:debugging
"""
FILES = {"llorch/__init__.py": "", "llorch/thing.py": SOURCE, "tests/test_thing.py": TEST, "pytest.ini": PLUGINS}
THING = Area("thing", "thing", "thing")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one module with a test that sees one half of it, and a pytest that starts with few plugins."""
    root = tmp_path / "repository"
    for file, text in FILES.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for module in (mutants, mutation_areas):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(mutants, "AREAS", (THING,))
    return root


@pytest.mark.slow
def test_a_bug_that_no_test_sees_survives_and_one_that_cannot_be_imported_does_not_count(repository: Path):
    tree = Tree(repository.parent / "copy", THING)
    tree.baseline()
    file = THING.files()[0]
    fates = {(edit.line, edit.text): tree.judge(Mutant(file, edit)).fate for edit in edits(SOURCE)}
    assert fates == {
        (1, "{'b': 2}"): "survived",
        (1, "{'a': 1}"): "invalid",
        (1, "2"): "survived",
        (1, "3"): "caught",
        (4, "x <= LIMIT"): "caught",
        (6, "x"): "survived",
    }
    assert (repository / file).read_text() == (tree.root / file).read_text() == SOURCE


def test_a_test_that_does_not_end_is_ended_with_what_it_started(repository: Path):
    tree = Tree(repository.parent / "copy", THING)
    (tree.root / "tests/test_thing.py").write_text("import os\ndef test_it():\n    os.system('sleep 600')\n")
    tree.limit = 3.0
    edit = next(iter(edits(SOURCE)))
    assert tree.judge(Mutant(THING.files()[0], replace(edit, at_import=False))).fate == "timed out"


def test_the_command_prints_the_share_and_the_survivors(repository: Path, monkeypatch: pytest.MonkeyPatch):
    done = CliRunner().invoke(main, ["--n", "9", "--jobs", "2", "--json", "--at-least", "0.9"])
    (result,) = json.loads(done.stdout)
    assert result["n_injected"] - result["caught"] == len(result["survivors"])
    assert "llorch/thing.py:6  not left out: return not x  ->  return x" in result["survivors"]
    assert done.exit_code == 1
    monkeypatch.setattr(mutants, "measure", lambda area, **options: Result(**{**result, "area": area.name}))
    del result["share"]
    for share, exit_code in (("0.9", 1), ("0.2", 0), ("0", 0)):
        assert CliRunner().invoke(main, ["--at-least", share]).exit_code == exit_code


def test_red_tests_are_no_measure(repository: Path):
    (repository / "tests/test_thing.py").write_text("def test_it():\n    assert False\n")
    done = CliRunner().invoke(main, [])
    assert (done.exit_code, done.stdout) == (1, "")
    assert_tells(done.stderr, "mutants", "thing", "red")


def test_a_sample_stays_when_lines_move(repository: Path):
    before = [str(mutant.edit.new_lines) for mutant in drawn(THING, 3)]
    (repository / "llorch/thing.py").write_text(f"import sys\n\n{SOURCE}")
    assert [str(mutant.edit.new_lines) for mutant in drawn(THING, 3)] == before
    assert any([mutant.edit.new_lines for mutant in drawn(THING, seed)] != before for seed in range(4))
