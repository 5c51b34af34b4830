import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.ggml_kernels import HAS_GGML
from helpers.refusals import assert_tells

from llorch.apps.doctor.machine.checks import (
    _check_c_kernels,
    _check_devices,
    _check_ggml_kernels,
    check_caches,
    check_engines,
    check_hardware,
    check_kernels,
    processor,
    self_test,
)
from llorch.ops.compiled.ggml import PACKAGE
from llorch.ops.compiled.library import library
from llorch.runtime.builtin import goldens_folder


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("processor\t: 0\nmodel name\t: Old 486\nflags\t\t: fpu avx512foo\n", "Old 486: none"),
        ("model name\t: New\nflags\t\t: fma avx2 amx_bf16\n\nmodel name\t: Other\n", "New: avx2 fma amx_bf16"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 sve\n", "asimd bf16 sve"),
    ],
)
def test_processor_check_names_the_relevant_features(text: str, description: str, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(text)
    found = processor(tmp_path / "cpuinfo")
    assert_tells(found, description)
    assert not {"fpu", "avx512foo", "fp", "Other"} & set(found.split())
    assert processor(tmp_path / "absent")


def test_threads_that_somebody_set_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    found = {one.name: one.text for one in check_hardware()}
    assert "MKL_NUM_THREADS=3" in found["cores"]
    assert "threads (NumPy 2." in found["BLAS"]
    assert "GB left" in found["memory"]


@pytest.mark.parametrize(
    ("facts", "driver", "state", "shown_facts"),
    [
        ({"built_for": "", "devices": []}, False, "ok", ("cpu",)),
        ({"built_for": "", "devices": []}, True, "warning", ("cpu", "GPU", "torch")),
        ({"built_for": "13.0", "devices": [], "why": "too old"}, True, "broken", ("GPU", "CUDA 13.0", "too old")),
        ({"built_for": "13.0", "devices": ["H100, 80 GB, sm_90"]}, True, "ok", ("cpu; H100, 80 GB, sm_90",)),
        ({}, False, "broken", ("torch crashes",)),
    ],
)
def test_devices_are_those_that_torch_sees(
    facts: dict, driver: bool, state: str, shown_facts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if driver:
        (tmp_path / "driver").touch()
    monkeypatch.setattr("llorch.apps.doctor.machine.checks._DRIVER", tmp_path / "driver")
    found = _check_devices(facts, "crashes")
    assert (found.state, bool(found.repair)) == (state, state in ("warning", "broken"))
    assert_tells(found.text, *shown_facts)


@pytest.mark.parametrize(
    ("facts", "state", "shown_fact"),
    [
        ({"compiler": ["/usr/bin/gcc", "-m64"], "kernels": True}, "ok", "by gcc"),
        ({"compiler": None, "kernels": False, "why_not": "none"}, "absent", "no C compiler"),
        ({"compiler": ["cc"], "kernels": False, "why_not": "no omp.h"}, "broken", "no omp.h"),
        ({"compiler": ["cc"]}, "broken", "lasts 180 s"),
    ],
)
def test_cpu_kernels_check_names_the_compiler_or_what_is_missing(facts: dict[str, object], state: str, shown_fact: str):
    check = _check_c_kernels(facts, "lasts 180 s")
    assert check.state == state
    assert_tells(check.text, shown_fact)


@pytest.mark.parametrize(
    ("facts", "state", "shown_facts"),
    [
        ({"ggml": "0.25.3"}, "ok", ("ggml 0.25.3",)),
        ({"why_no_ggml": "no library"}, "absent", ("no library", "slower")),
        ({}, "broken", ("SIGSEGV", "slower")),
    ],
)
def test_ggml_s_kernels_are_named_or_why_they_do_not_run(facts: dict, state: str, shown_facts: tuple[str, ...]):
    check = _check_ggml_kernels(facts, "SIGSEGV")
    assert check.state == state
    assert_tells(check.text, *shown_facts)
    assert (PACKAGE in check.repair) == (state != "ok")


def test_kernels_are_loaded_in_a_child_that_needs_no_torch():
    c_kernels, ggml_kernels = check_kernels()
    assert c_kernels.state == ("ok" if library() is not None else "absent")
    assert ggml_kernels.state == ("ok" if HAS_GGML else "absent")


def test_engine_versions_are_compared_with_those_of_the_goldens(monkeypatch: pytest.MonkeyPatch):
    there = {"llama-cpp-python": "0.3.36", "transformers": "5.99.1", "torch": "2.13.0+cu130"}
    monkeypatch.setattr("llorch.apps.doctor.machine.checks.installed_version", there.get)
    llamacpp, transformers = check_engines({})
    assert (llamacpp.state, transformers.state) == ("ok", "warning")
    assert_tells(llamacpp.text, "llama-cpp-python 0.3.36")
    there_is, made_by = transformers.text.split(";")
    assert_tells(there_is, "transformers 5.99.1", "torch 2.13.0+cu130")
    assert_tells(made_by, "goldens", "transformers 5.23.0")
    assert "torch" not in made_by  # the same but for its build
    assert [one.state for one in check_engines({"torch": "ImportError"})] == ["ok", "broken"]
    del there["llama-cpp-python"]
    assert next(iter(check_engines({}))).repair == "pip install 'llorch[golden]'"


def test_caches_are_where_the_environment_says_and_links_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blobs = tmp_path / "huggingface/hub/models--a--b/blobs"
    blobs.mkdir(parents=True)
    (blobs / "1").write_bytes(bytes(2_500_000))
    (blobs.parent / "link").symlink_to(blobs / "1")
    hub, own = check_caches()
    assert_tells(hub.text, f"{tmp_path}/huggingface/hub: 2.5 MB")
    assert_tells(own.text, f"{tmp_path}/llorch: not")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    assert_tells(next(iter(check_caches())).text, f"{tmp_path}/elsewhere/hub: not")


def test_a_cache_below_a_file_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    assert [cache.state for cache in check_caches()] == ["warning", "warning"]


def test_the_cache_is_where_huggingface_hub_keeps_it(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", constants.HF_HUB_CACHE)
    assert next(iter(check_caches())).text.startswith(f"{constants.HF_HUB_CACHE}: ")


def test_the_self_test_sees_a_wrong_number_and_a_missing_golden(tmp_path: Path):
    assert self_test().state == "ok"
    missing = self_test(tmp_path)
    assert missing.state == "broken"
    assert_tells(missing.text, "golden.json")
    shutil.copytree(goldens_folder() / "micro-llama3", tmp_path / "micro-llama")
    wrong = self_test(tmp_path)
    assert wrong.state == "broken"
    assert_tells(wrong.text, "stage")


@pytest.mark.parametrize(("free", "state"), [(10**9, "ok"), (10**9 - 1, "warning")])
def test_a_cache_is_noted_where_less_than_a_gigabyte_is_free(free: int, state: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(free=free))
    monkeypatch.setattr("os.access", lambda _place, _mode: True)
    assert {check.state for check in check_caches()} == {state}
