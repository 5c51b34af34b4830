"""`.ci/variants.py`: a variant that cannot run, or did not take effect, is no variant that passed."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
from helpers.command_line import REPOSITORY


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("variants", REPOSITORY / ".ci/variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "variants", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_processor_flags", lambda: {"avx2"})
    monkeypatch.setattr(module, "kernels", lambda environment: {"openblas": "Zen", "aten": "AVX2"})
    return module


@pytest.mark.parametrize(
    ("name", "verdict"),
    {
        "OpenBLAS SkylakeX": "NOT RUN: the processor has no avx512f",
        "OpenBLAS Haswell": "FAILED: it did not take effect; expected {'openblas': 'Haswell'}",
        "ATen AVX2": "passed",
    }.items(),
)
def test_only_a_variant_that_took_effect_passes(name: str, verdict: str, variants, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(variants, "_python", lambda arguments, environment: "")
    assert variants.run(name, "0/1") == verdict


def test_a_command_that_fails_under_a_variant_fails_it(variants, monkeypatch: pytest.MonkeyPatch):
    def red(arguments, environment):
        raise subprocess.CalledProcessError(1, arguments, output="1 failed")

    monkeypatch.setattr(variants, "_python", red)
    assert variants.run("ATen AVX2", "0/1") == "FAILED: python -m llorch verify micro-qwen3 story ended with 1"


def test_all_sampled_files_are_there(variants):
    assert [name for name in variants.FILES.split() if not (REPOSITORY / variants.test_file(name)).is_file()] == []
