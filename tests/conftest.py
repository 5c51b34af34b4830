"""Fixtures for all tests; llorch is imported inside them only, or its shape checks would be hooked in too late."""

import gc
import os
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import shape_checks
from helpers.clean_environment import clean_environment
from helpers.processor_time import ProcessorTime
from helpers.shared_folder import shared_folder
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from helpers.chromium import Browser

    from llorch.families.config import ModelConfig

OF_IMPLEMENTATION = "test_checkpoints_of_implementation.py"
WITHOUT_CASE = pytest.StashKey[list[tuple[str, str]]]()
WITHOUT_DAY = pytest.StashKey[list[str]]()
LEFT_OUT = "live or slow or weights or nightly"
CASE_MARKS = {"slow_cases": "slow", "nightly_cases": "nightly"}  # mark of a function: mark of the cases that it names
shape_checks.install()
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # of the processes that are started from here: those of xdist are one a core
threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), "blas")  # NumPy is loaded already: a plugin imports it
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in Triton's interpreter where there is no device


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests to `.ci/run` and nightly ones to the night, unless asked for; measure what each test costs."""
    os.environ.pop("PYTEST_ADDOPTS", None)  # for this run of pytest, not for one that a test starts
    config.pluginmanager.register(ProcessorTime(config.option.processor_limit))
    if not config.option.markexpr and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.option.markexpr = f"not ({LEFT_OUT})"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts workers; pytest's own colours are chosen by now
def pytest_sessionstart() -> None:
    """Remove the variables of the user's shell that tests must not see."""
    clean_environment(os.environ)


def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are cores: tests wait for ranks, servers and other processes."""
    return (os.cpu_count() or 1) + 1


def pytest_make_parametrize_id(val: object) -> str | None:
    """Give a page below `checkpoints/` no id that `-k checkpoint` asks for."""
    return val.removeprefix("checkpoints/") if isinstance(val, str) and val.startswith("checkpoints/") else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the tests of an implementation with `--impl`, and all others without; None leaves it to other hooks."""
    is_other = (collection_path.name == OF_IMPLEMENTATION) != bool(config.option.impl)
    return (collection_path.is_file() and is_other) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while tests are collected, and never among them: a sixth of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as their function says, note functions with nightly cases only, and select the part of `--part`."""
    named: dict[tuple[str, str], bool] = {}  # function and pattern: has it a case?
    by_day: dict[str, bool] = {}  # function: has it a case that is not nightly?
    for item in items:
        function, _, case = item.nodeid.removesuffix("]").partition("[")
        for mark in [mark for mark in item.iter_markers() if mark.name in CASE_MARKS]:
            patterns = mark.kwargs.get("but", mark.args)
            fits = {pattern: fnmatchcase(case, pattern) for pattern in patterns}
            for pattern, fit in fits.items():
                named[function, pattern] = fit or named.get((function, pattern), False)
            if any(fits.values()) == (patterns is mark.args):
                item.add_marker(CASE_MARKS[mark.name])
        by_day[function] = by_day.get(function, False) or item.get_closest_marker("nightly") is None
    config.stash[WITHOUT_CASE] = [function_and_pattern for function_and_pattern, fit in named.items() if not fit]
    config.stash[WITHOUT_DAY] = [function for function, kept in by_day.items() if not kept]
    part, n_parts = config.option.part
    in_part = [zlib.crc32(item.nodeid.encode()) % n_parts == part - 1 for item in items]
    config.hook.pytest_deselected(items=[item for item, is_mine in zip(items, in_part, strict=True) if not is_mine])
    items[:] = [item for item, is_mine in zip(items, in_part, strict=True) if is_mine]


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A live test needs the engines, a `gpu` test a CUDA device; without them it says that it did not run."""
    missing = [
        name for name in ("llama_cpp", "peft", "tensorboard", "torch", "transformers") if find_spec(name) is None
    ]
    if missing and item.get_closest_marker("live"):
        pytest.skip(f"NOT RUN: {', '.join(missing)} not installed; pip install -c constraints.txt -e '.[golden]'")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("NOT RUN: torch finds no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Where torch or transformers is absent a file that imports it did not run, and says so."""
    report = yield
    for name in ("torch", "transformers"):
        if report.failed and find_spec(name) is None and f"No module named '{name}'" in str(report.longrepr):
            report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"NOT RUN: {name} is not installed")
    return report


@pytest.hookimpl(wrapper=True)  # around the fixtures too, whatever their scope, and whatever becomes of the test
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The number of torch's threads is that of the process: what one test sets must not reach the next."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    try:
        return (yield)
    finally:
        if torch and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep llorch's cache between runs apart from the user's: it is neither read there nor left there.

    Workers share it, as the processes of a user do: the library of CPU kernels is compiled once. LLORCH_TESTS_CACHE
    names a folder that several runs share.
    """
    cache = Path(os.environ.get("LLORCH_TESTS_CACHE") or shared_folder(tmp_path_factory) / "own_cache")
    cache.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture
def warm_ranks() -> Iterator[None]:
    """Ranks of a mesh start as copies of a process that has imported torch already."""
    from helpers.warm_ranks import warm_ranks

    with warm_ranks():
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Browser"]:
    """A page in a real browser."""
    from helpers.chromium import PROGRAM, chromium

    if PROGRAM is None:
        pytest.skip("NOT RUN: no Chromium is installed")
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def hooks(request: pytest.FixtureRequest) -> Any:
    """This file, for the tests of what it promises."""
    return next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "__file__", "") == __file__)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(params=[np.float32, np.float64])
def dtype(request: pytest.FixtureRequest) -> type[np.floating]:
    return request.param


@pytest.fixture(params=["widened", "own dtype"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways an op may compute: small arrays widened to float64, and large ones in their own dtype."""
    from llorch.ops.precision import own_dtype_only

    with own_dtype_only() if request.param == "own dtype" else nullcontext():
        yield request.param


@pytest.fixture
def config() -> "ModelConfig":
    """A Qwen3 whose dimensions are pairwise different, with two query heads to a key head."""
    from llorch.families.config import ModelConfig

    return ModelConfig(
        family="qwen3", hidden_size=20, intermediate_size=28, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6,
        vocab_size=31, rms_norm_eps=1e-5, rope_theta=5000.0, rope_scaling=None, max_position_embeddings=40,
        qkv_bias=False, o_bias=False, qk_norm=True, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the size of files is limited: Python 3.11 keeps bytecode of a module that was cut short."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
