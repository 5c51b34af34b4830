"""Guarantees that `conftest.py` gives each test; no test asserts seconds on a clock."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from beartype import beartype
from helpers.clean_environment import clean_environment
from helpers.refusals import refuses
from helpers.shape_checks import checked
from jaxtyping import Float, TypeCheckError

ROOT = Path(__file__).parents[2]
THREADS = torch.get_num_threads()


@pytest.fixture(scope="module")
def more_threads() -> None:
    torch.set_num_threads(THREADS + 2)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_no_test_meets_the_threads_that_another_has_set(turn: str):
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(THREADS + 1)


def test_a_fixture_may_set_the_threads(more_threads: None):
    assert torch.get_num_threads() == THREADS + 2


def test_threads_set_by_a_fixture_end_with_its_test():
    assert torch.get_num_threads() == THREADS


Rows = Float[np.ndarray, "rows width"]


@checked(typechecker=beartype)
def joined(x: Rows, y: Float[np.ndarray, " width"] | None = None, *, n: int = 1) -> Rows:
    return x[:n] if y is None else x


@checked(typechecker=beartype)
def repeat_name(name: "str", x: "Rows | None" = None) -> "str":
    return name * 2 if name else None  # type: ignore[return-value]


@checked(typechecker=beartype)
def unchecked(name: str) -> str:
    return name


@checked(typechecker=beartype)
def parts(x: Rows) -> Iterator[int]:
    yield from range(len(x))


@checked(typechecker=beartype)
@dataclass
class Held:
    rows: Rows
    more: "Held | None" = None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: joined(np.zeros((2, 3)), np.zeros(4)),
        lambda: joined(np.zeros((2, 3), np.int64)),
        lambda: joined(np.zeros((2, 3)), n=1),  # the result has other rows
        lambda: joined(np.zeros((1, 3)), n=1.0),  # type: ignore[arg-type]
        lambda: repeat_name(3),  # type: ignore[arg-type]
        lambda: repeat_name(""),
        lambda: next(parts(np.zeros(2))),
        lambda: Held(np.zeros(3)),
    ],
)
def test_arrays_that_an_annotation_forbids_are_refused(wrong):
    with pytest.raises(TypeCheckError):
        wrong()


def test_types_without_axes_are_left_to_pyright():
    assert unchecked(3) == 3  # type: ignore[arg-type]


def test_each_call_has_axes_of_its_own():
    for width in (3, 4):
        assert joined(np.zeros((2, width)), np.zeros(width)).shape == (2, width)
        assert Held(np.zeros((2, width)), Held(np.zeros((3, 5)))).rows.shape == (2, width)
    assert (repeat_name("a"), [*parts(np.zeros((2, 1)))]) == ("aa", [0, 1])


@checked(typechecker=beartype)
def some(x: Rows, selection: list[bool]) -> Rows | list[Rows]:
    return [x] if len(selection) == 1 else x[: sum(selection)] if all(selection) else x[0]


def test_arrays_that_passed_once_are_checked_again_where_they_may_differ():
    x = np.zeros((2, 3))
    for _ in range(2):
        assert joined(x, n=2).shape == (2, 3)
        assert (len(some(x, [True, True])), len(some(x, [True]))) == (2, 1)
        for wrong in (lambda: joined(x, n=1), lambda: some(x, [True, False]), lambda: some(x, [1])):  # type: ignore[list-item]
            with pytest.raises(TypeCheckError):
                wrong()


X = np.zeros((2, 3))


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@checked(typechecker=beartype)
def rows_by_name(rows: list[Rows] | dict[str, Rows] | tuple[Rows, ...] | Pair, *, n: int = 1) -> dict[str, Rows]:
    return {"all": rows[0] if isinstance(rows, list | tuple) else rows["a"]} if n == 1 else {"all": np.zeros(n)}


@pytest.mark.parametrize("wrap", [list, tuple, lambda two: {"a": two[0], "b": two[1]}, lambda two: Pair(*two)])
def test_arrays_in_small_containers_are_checked_again_where_they_may_differ(wrap: Any):
    x = np.zeros((2, 3))
    for _ in range(2):
        assert rows_by_name(wrap([x, x]))["all"].shape == (2, 3)
    for wrong in (lambda: rows_by_name(wrap([x, x]), n=5), lambda: rows_by_name(list(map(np.ravel, [x, x])))):
        with pytest.raises(TypeCheckError):
            wrong()


@checked(typechecker=beartype)
def counted(rows: dict[str, Rows] | list[Rows] | Pair) -> int:
    return len(rows)


@pytest.mark.parametrize("wrong", [{"a": X[0]}, {"a": X.astype(np.int64)}, {1: X}, [X[0]], ["x"]])
def test_containers_that_differ_in_one_value_are_not_taken_for_one_another(wrong: Any):
    assert counted({"a": X}) == counted([X]) == 1
    with pytest.raises(TypeCheckError):
        counted(wrong)


class OneValue(Mapping[str, np.ndarray]):
    def __init__(self, value: Any) -> None:
        self.value, self.n_read = value, 0

    def __getitem__(self, name: str) -> Any:
        self.n_read += 1
        return self.value

    def __iter__(self) -> Iterator[str]:
        yield "a"

    def __len__(self) -> int:
        return 1


class OneOfAnyKind(OneValue, Mapping[str, Any]): ...


@checked(typechecker=beartype)
def n_values(x: Rows, of: Mapping[str, Rows]) -> int:
    return len(of)


def test_a_mapping_is_read_again_unless_its_class_allows_anything():
    right, wrong = OneValue(X), OneValue("x")
    assert n_values(X, right) == n_values(X, right) == 1
    with pytest.raises(TypeCheckError):
        n_values(X, wrong)
    of_any = OneOfAnyKind(X)
    assert n_values(X, of_any) == n_values(X, of_any) == 1
    assert (right.n_read, of_any.n_read) == (2, 1)


def test_a_refusal_says_the_shapes_of_the_call():
    with refuses(TypeCheckError, "y=") as error:
        joined(np.zeros((2, 3)), np.zeros(4), n=2)
    assert error.value.__notes__ == ["called with (2, 3), (4,), int"]


def test_an_annotation_that_cannot_be_read_here_is_no_error():
    def odd(x: "np.no_such_type", y: Rows) -> None: ...  # type: ignore[reportAttributeAccessIssue]

    with pytest.raises(TypeCheckError):
        checked(odd, typechecker=beartype)(1, "2")


@pytest.mark.parametrize(
    ("source", "marks", "expected"),
    [
        ("TESTPATHS", "", "not (live or slow or weights or nightly)"),
        ("INVOCATION_DIR", "", "not (live or slow or weights or nightly)"),
        ("TESTPATHS", "live", "live"),
        ("ARGS", "", ""),  # a file by its name: all of it
    ],
)
def test_slow_tests_run_if_requested(hooks: Any, source: str, marks: str, expected: str):
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=marks, processor_limit=None),
        args_source=pytest.Config.ArgsSource[source],
        pluginmanager=pytest.PytestPluginManager(),
    )
    hooks.pytest_configure(config)
    assert config.option.markexpr == expected


def config_of_part(part: int, n_parts: int) -> Any:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    return SimpleNamespace(stash=pytest.Stash(), option=SimpleNamespace(part=(part, n_parts)), hook=hook)


def item_of(case: str, *marks: pytest.Mark) -> Any:
    added: list[str] = []
    of = SimpleNamespace(nodeid=case, iter_markers=lambda: marks, add_marker=added.append, added=added)
    of.get_closest_marker = lambda name: name if name in added else None
    return of


@pytest.mark.parametrize(
    ("mark", "first", "second"),
    [
        (pytest.mark.slow_cases("micro-*", "gone"), ["slow"], []),
        (pytest.mark.slow_cases(but=["micro-*", "gone"]), [], ["slow"]),
        (pytest.mark.nightly_cases("micro-*", "gone"), ["nightly"], []),
        (pytest.mark.nightly_cases(but=["micro-*", "gone"]), [], ["nightly"]),
    ],
)
def test_cases_get_the_mark_of_a_pattern(hooks: Any, mark: pytest.MarkDecorator, first: list[str], second: list[str]):
    of = mark.mark
    items = [item_of("f.py::test_a[micro-llama]", of), item_of("f.py::test_a[story]", of), item_of("f.py::test_b")]
    config = config_of_part(1, 1)
    hooks.pytest_collection_modifyitems(config, items)
    assert [item.added for item in items] == [first, second, []]
    assert config.stash[hooks.WITHOUT_CASE] == [("f.py::test_a", "gone")]
    assert config.stash[hooks.WITHOUT_DAY] == []


def test_a_test_all_of_whose_cases_are_nightly_is_found(hooks: Any):
    of = pytest.mark.nightly_cases("*").mark
    config = config_of_part(1, 1)
    hooks.pytest_collection_modifyitems(config, [item_of(f"f.py::test_a[{case}]", of) for case in "12"])
    assert config.stash[hooks.WITHOUT_DAY] == ["f.py::test_a"]


def test_part_option_selects_each_test_in_exactly_one_part(hooks: Any):
    names = [f"f.py::test_a[{case}]" for case in range(200)]
    parts = [[item_of(name) for name in names] for _ in range(4)]
    for index, items in enumerate(parts):
        hooks.pytest_collection_modifyitems(config_of_part(index + 1, 4), items)
    assert sorted(item.nodeid for items in parts for item in items) == sorted(names)
    assert min(map(len, parts)) > 30


@pytest.mark.parametrize("text", ["3", "0/4", "5/4", "x/4"])
def test_part_option_without_a_part_of_a_number_is_refused(text: str, request: pytest.FixtureRequest):
    with refuses(pytest.UsageError, "--part", text):
        request.config._parser.parse(["--part", text])


@pytest.mark.parametrize("arguments", [("weekly",), ("nightly", "5/4"), ("nightly", "0/4"), ("nightly", "4")])
def test_ci_run_with_other_arguments_exits_with_usage(arguments: tuple[str, ...]):
    done = subprocess.run([ROOT / ".ci/run", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f".ci/run {' '.join(arguments)}\n")


def test_an_id_below_checkpoints_is_no_checkpoint(hooks: Any):
    assert hooks.pytest_make_parametrize_id("checkpoints/guide/files.md") == "guide/files.md"
    assert hooks.pytest_make_parametrize_id("checkpoint_06") is None


def test_every_test_has_a_case_that_is_not_left_to_the_night(hooks: Any, request: pytest.FixtureRequest):
    assert request.config.stash[hooks.WITHOUT_DAY] == []


def test_every_pattern_of_cases_has_a_case(hooks: Any, request: pytest.FixtureRequest):
    assert request.config.stash[hooks.WITHOUT_CASE] == []


def test_a_checked_function_is_compiled_as_if_it_were_not():
    @checked(typechecker=beartype)
    def doubled(x: Float[torch.Tensor, "rows width"]) -> Float[torch.Tensor, "rows width"]:
        return 2 * x

    with pytest.raises(TypeCheckError):
        doubled(torch.ones(2))
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2, 3), 2.0))


SHELL = {
    "NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "40", "LC_ALL": "C", "PYTHONWARNINGS": "error",
    "HF_HOME": "/nowhere", "XDG_STATE_HOME": "/nowhere", "https_proxy": "http://nowhere", "GIT_DIR": "/nowhere",
    "LLORCH_IMPL": "/nowhere", "LLORCH_RUN_MAX_TOKENS": "1", "RANK": "1", "TRANSFORMERS_CACHE": "/nowhere",
}  # fmt: skip


def test_no_test_sees_the_settings_of_a_users_shell():
    assert {*SHELL, "PYTEST_ADDOPTS"}.isdisjoint(os.environ)
    environment = SHELL | {"TZ": "Asia/Kathmandu", "LANG": "de_DE", "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    clean_environment(environment)
    assert environment == {
        "LANG": "C.UTF-8", "TZ": "UTC", "HF_HUB_OFFLINE": "1", "PATH": "/bin", "OMP_NUM_THREADS": "2"
    }  # fmt: skip


def test_variables_by_which_ci_steers_the_tests_stay():
    text = "".join((ROOT / ".ci" / name).read_text(encoding="utf-8") for name in ("run", "installed", "variants.py"))
    names = {*re.findall(r"LLORCH_[A-Z_]+|\bPYTHONPATH|[A-Z]+_CORETYPE|[A-Z]+_NUM_THREADS", text)}
    environment = dict.fromkeys(names, "1")
    clean_environment(environment)
    assert "LLORCH_TESTS_CACHE" in names
    assert environment.keys() >= names


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", ["0", "1"])
def test_a_test_of_colours_passes_whatever_the_shell_says(n_workers: str):
    test = "tests/cli/test_data.py::test_a_terminal_gets_colours_unless_it_does_not_want_any"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", n_workers, test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout


TESTS = Path(__file__).parents[1]
CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")


def reads_clock(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr.removesuffix("_ns") in CLOCKS for node in ast.walk(tree))


def clock_assertions(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of assertions about a clock; a loop that waits may give up at a time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assert) and reads_clock(node.test):
            yield node.lineno
        elif not isinstance(node, ast.While):
            yield from clock_assertions(node)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def test():\n    assert time.process_time() - start < 1", [2]),
        ("while not ready():\n    assert time.monotonic() < end", []),
    ],
)
def test_an_assertion_about_a_clock_is_seen_outside_of_a_loop_that_waits(source: str, lines: list[int]):
    assert [*clock_assertions(ast.parse(source))] == lines


def test_no_test_asserts_seconds_on_a_clock():
    sources = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    trees = {path: ast.parse(source) for path, source in sources.items() if any(clock in source for clock in CLOCKS)}
    assert [(path.name, line) for path, tree in trees.items() for line in clock_assertions(tree)] == []
