"""Devices and dtypes: what was asked for is used or refused in one line."""

import json
import logging
import os
import subprocess
import sys
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import Refusal, assert_cli_refuses, assert_tells, refuses, row
from threadpoolctl import threadpool_info

from llorch.files import open_weights
from llorch.model.model import load
from llorch.pytorch.cache import Cache
from llorch.pytorch.device import Target, compute_as_named, require_dtype, require_index, target
from llorch.pytorch.load import load_dense
from llorch.pytorch.model import load_torch
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import MissingDevice

VERBS = [["run", "story", "Once"], ["bench", "story"], ["verify", "micro-llama"]]
EVERY_VERB = pytest.mark.parametrize("verb", VERBS)
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: there is a CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_cpu_has_every_dtype(dtype: str):
    made = target("cpu", dtype)
    assert str(made) == f"torch-cpu-{dtype}"
    assert made.dtype_name == dtype


@pytest.mark.parametrize(
    "device",
    ["", "gpu", "CPU", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "cuda:1.5", "cuda:99999", "cuda:\u0663", "mps"],
)
def test_unknown_device_is_refused(device: str):
    with refuses(ValueError, where="device", expected=("cpu", "cuda", "cuda:N"), got=repr(device)):
        target(device)


EVERY_DTYPE = ("float32", "bfloat16", "float16", "float64")
REFUSALS = [
    row("dtype without a meaning", lambda: target("cpu", "int3"),
        ValueError, where="dtype", expected=EVERY_DTYPE, got="'int3'"),
    row("device beyond the last", lambda: require_index("cuda:9", 9, 2),
        MissingDevice, "2", "cuda:0", "cuda:1", where="device cuda:9"),
    row("bfloat16 that the device lacks", lambda: require_dtype("cuda", "Tesla T4", (7, 5), torch.bfloat16),
        MissingDevice, "Tesla T4", "7.5", "bfloat16", "8.0", "--dtype float32", where="device cuda"),
    row("float16 that the device lacks", lambda: require_dtype("cuda", "Old", (5, 2), torch.float16),
        MissingDevice, "Old", "5.2", "float16", "5.3", "--dtype float32", where="device cuda"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_unsupported_dtype_of_a_device_is_refused(refusal: Refusal):
    refusal.check()


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:9"])
def test_missing_cuda_never_falls_back(device: str):
    why = "built" if torch.version.cuda is None else "finds"
    with refuses(MissingDevice, why, torch.__version__, "--device cpu", where=f"device {device}"):
        target(device)


def test_existing_cuda_device_is_accepted_and_missing_or_old_ones_are_refused():
    require_index("cuda:1", 1, 2)
    with refuses(MissingDevice, 2, where="device cuda:2"):
        require_index("cuda:2", 2, 2)
    require_dtype("cuda", "Old", (5, 2), torch.float32)
    for dtype, has, lacks in ((torch.float16, (5, 3), (5, 2)), (torch.bfloat16, (8, 0), (7, 9))):
        require_dtype("cuda", "Any", has, dtype)
        with refuses(MissingDevice, ".".join(map(str, has)), ".".join(map(str, lacks)), where="device cuda"):
            require_dtype("cuda", "Any", lacks, dtype)


@pytest.mark.gpu
def test_requested_cuda_device_is_used():
    made = target("cuda", "float32")
    assert made.device == torch.device("cuda", 0)
    assert torch.ones(1, device=made.device).device == made.device
    with refuses(MissingDevice, where="device cuda:999"):
        target("cuda:999")


@pytest.mark.gpu
def test_expected_cuda_warnings_of_torch_are_suppressed():
    said = (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting it",
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context...",
        "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction. Cut an issue",
    )
    compute_as_named(target("cuda"))
    for text in said:
        warnings.warn(text, UserWarning, stacklevel=1)
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


@EVERY_VERB
@NO_CUDA
def test_a_missing_device_is_one_line_and_exit_code_3(verb: list[str]):
    result = invoke(*verb, "--backend", "torch", "--device", "cuda:9")
    assert_cli_refuses(result, 3, "CUDA", where="device cuda:9")
    assert result.stderr.count("\n") == 1


@EVERY_VERB
def test_unknown_device_names_exit_with_code_2(verb: list[str]):
    device = invoke(*verb, "--backend", "torch", "--device", "gpu")
    assert_cli_refuses(device, 2, where="device", expected=("cpu", "cuda", "cuda:N"), got="'gpu'")
    assert device.stderr.count("\n") == 1
    dtype = invoke(*verb, "--backend", "torch", "--dtype", "int3")
    assert_cli_refuses(dtype, 2, "'int3'", *map(repr, EVERY_DTYPE), where="--dtype")


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from helpers.command_line import invoke
for verb in json.loads(sys.argv[1]):
    result = invoke(*verb, "--backend", "torch")
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""


@cache
def without_torch() -> list[list[Any]]:
    """Exit code, stdout and stderr of each verb in a process that finds no torch."""
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(VERBS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests/support")))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.nightly_cases("verb0")
@EVERY_VERB
def test_missing_torch_prints_one_line_with_the_install_command(verb: list[str]):
    code, stdout, stderr = without_torch()[VERBS.index(verb)]
    assert (code, stdout) == (3, "")
    assert stderr.startswith("llorch: ")
    assert_tells(stderr, "torch", "pip install 'llorch[torch]'")
    assert stderr.count("\n") == 1


def test_mixed_devices_are_refused_before_any_product():
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")  # a device that every machine has
    model = load_dense(open_weights(builtin_path("micro-llama")), dtype=torch.float32, device=cpu)
    cache = Cache(model.config, batch=1, n_slots=4, dtype=torch.float32, device=cpu)
    positions = torch.arange(2)[None]
    with refuses(ValueError, "cache", "cpu", "positions on meta", where="forward"):
        cache.place(positions.to(elsewhere), ctx=2)
    place = cache.place(positions, ctx=2)
    with refuses(ValueError, "cache", "cpu", "ids on meta", where="forward"):
        model(positions.to(elsewhere), place, cache)
    with refuses(ValueError, "cache", "cpu", "weights on meta", where="forward"):
        model.to(elsewhere)(positions, place, cache)


def test_float32_precision_ignores_global_torch_settings(
    monkeypatch: pytest.MonkeyPatch,
):
    torch.set_float32_matmul_precision("medium")
    load_torch("micro-llama")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    try:
        compute_as_named(Target(torch.device("cuda", 0), torch.bfloat16))
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced


def test_loading_and_generating_on_the_cpu_leave_torch_settings_unchanged():
    def switches() -> list[object]:
        matmul = torch.backends.cuda.matmul
        return [
            torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision(), matmul.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction,
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist(),
            dict(os.environ), np.geterr(), list(warnings.filters), logging.root.level, threadpool_info(),
        ]  # fmt: skip

    before = switches()
    for model in (load("micro-llama"), load_torch("micro-llama")):
        list(model.generate("Once", max_tokens=2))
    assert switches() == before
