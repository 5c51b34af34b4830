"""Devices and dtypes: what was asked for is used or refused in one line."""

import logging
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from command_line import invoke
from threadpoolctl import threadpool_info

from llorch.builtin import builtin_path
from llorch.errors import MissingDevice
from llorch.files import open_weights
from llorch.model import load
from llorch.pytorch.cache import Cache
from llorch.pytorch.device import Target, compute_as_named, require_dtype, require_index, target
from llorch.pytorch.load import load_dense
from llorch.pytorch.model import load_torch

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_cpu_has_every_dtype(dtype: str):
    made = target("cpu", dtype)
    assert str(made) == f"torch-cpu-{dtype}"
    assert made.dtype_name == dtype


@pytest.mark.parametrize(
    "device",
    ["", "gpu", "CPU", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "cuda:1.5", "cuda:99999", "cuda:\u0663", "mps"],
)
def test_a_device_without_a_meaning_is_refused(device: str):
    with pytest.raises(ValueError, match=r"^device: expected cpu, cuda or cuda:N, got ") as caught:
        target(device)
    assert str(caught.value).endswith(repr(device))


def test_a_dtype_without_a_meaning_is_refused():
    with pytest.raises(ValueError, match=r"^dtype: expected one of float32, bfloat16, float16, float64, got 'int3'$"):
        target("cpu", "int3")


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:9"])
def test_cuda_that_is_not_here_is_never_replaced(device: str):
    with pytest.raises(MissingDevice) as caught:
        target(device)
    why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    assert str(caught.value) == f"device {device}: {why} (torch {torch.__version__}); use --device cpu"


def test_a_device_beyond_the_last_is_refused():
    require_index("cuda:1", 1, 2)
    with pytest.raises(MissingDevice, match=r"^device cuda:9: this machine has 2 CUDA devices, cuda:0 to cuda:1$"):
        require_index("cuda:9", 9, 2)


def test_a_dtype_that_the_device_lacks_is_refused_rather_than_emulated():
    require_dtype("cuda", "Tesla T4", (7, 5), torch.float16)
    require_dtype("cuda", "Tesla T4", (7, 5), torch.float32)
    require_dtype("cuda", "NVIDIA A100", (8, 0), torch.bfloat16)
    with pytest.raises(MissingDevice) as caught:
        require_dtype("cuda", "Tesla T4", (7, 5), torch.bfloat16)
    expected = "device cuda: Tesla T4 (compute capability 7.5) has no bfloat16, which needs 8.0; use --dtype float32"
    assert str(caught.value) == expected
    with pytest.raises(MissingDevice, match=r"has no float16, which needs 5.3"):
        require_dtype("cuda", "Old", (5, 2), torch.float16)


@pytest.mark.gpu
def test_cuda_is_what_is_got_when_it_is_asked_for():
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch finds no CUDA device")
    made = target("cuda", "float32")
    assert made.device == torch.device("cuda", 0)
    assert torch.ones(1, device=made.device).device == made.device
    with pytest.raises(MissingDevice, match="this machine has "):
        target("cuda:999")


@pytest.mark.gpu
def test_what_torch_says_of_cuda_that_is_meant_so_reaches_nobody():
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch finds no CUDA device")
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


@pytest.mark.parametrize("verb", [["run", "story", "Once"], ["bench", "story"], ["verify", "micro-llama"]])
@NO_CUDA
def test_a_missing_device_is_one_line_and_exit_code_3(verb: list[str]):
    result = invoke(*verb, "--backend", "torch", "--device", "cuda:9")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("llorch: device cuda:9: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [["run", "story", "Once"], ["bench", "story"], ["verify", "micro-llama"]])
def test_names_without_a_meaning_are_exit_code_2(verb: list[str]):
    device = invoke(*verb, "--backend", "torch", "--device", "gpu")
    assert (device.exit_code, device.stdout) == (2, "")
    assert device.stderr == "llorch: device: expected cpu, cuda or cuda:N, got 'gpu'\n"
    dtype = invoke(*verb, "--backend", "torch", "--dtype", "int3")
    assert dtype.exit_code == 2
    assert "'int3' is not one of 'float32', 'bfloat16', 'float16', 'float64'" in " ".join(dtype.stderr.split())


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from llorch.cli import main
main(sys.argv[1:], prog_name="llorch")
"""


@pytest.mark.parametrize("verb", [["run", "story", "Once"], ["bench", "story"], ["verify", "micro-llama"]])
def test_absent_torch_is_one_line_that_says_what_to_install(verb: list[str]):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *verb, "--backend", "torch"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("llorch: torch is not installed; get it with: pip install 'llorch[torch]'")
    assert done.stderr.count("\n") == 1


def test_mixed_devices_are_refused_before_any_product():
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")  # a device that every machine has
    model = load_dense(open_weights(builtin_path("micro-llama")), dtype=torch.float32, device=cpu)
    cache = Cache(model.config, batch=1, n_slots=4, dtype=torch.float32, device=cpu)
    positions = torch.arange(2)[None]
    with pytest.raises(
        ValueError, match=r"^forward: the cache lies on cpu, positions on meta; put both on one device$"
    ):
        cache.place(positions.to(elsewhere), ctx=2)
    place = cache.place(positions, ctx=2)
    with pytest.raises(ValueError, match=r"^forward: the cache lies on cpu, ids on meta"):
        model(positions.to(elsewhere), place, cache)
    with pytest.raises(ValueError, match=r"^forward: the cache lies on cpu, weights on meta"):
        model.to(elsewhere)(positions, place, cache)


def test_float32_is_float32_and_sums_are_not_rounded_whatever_a_library_had_switched_on(
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


def test_a_process_that_loads_and_generates_on_the_cpu_is_as_it_was():
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
