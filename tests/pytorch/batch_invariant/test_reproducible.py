"""Reproducible mode: hashes of logits, whatever the company of a prompt and however it is cut."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from helpers import reproducible_runs
from helpers.command_line import REPOSITORY
from helpers.reproducible_runs import (
    CPU,
    DTYPES,
    LENGTHS,
    Runner,
    hashes_in_company,
    hashes_when_cut,
    runner,
    sha256,
    verdict,
)
from torch.nn import functional

from llorch.files import open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.model.model import load
from llorch.pytorch.batch_invariant import fixed_order, reproducible
from llorch.pytorch.batch_invariant.fixed_order import FixedNorm, exp, softmax, swiglu, tree_sum
from llorch.pytorch.batch_invariant.reproducible import FixedRows, make_reproducible
from llorch.pytorch.causal_lm import RMSNorm, keep_nothing
from llorch.pytorch.causal_lm import swiglu as plain_swiglu
from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.lora import modules
from llorch.pytorch.models import delta_net, delta_rule
from llorch.runtime.builtin import builtin_path


@pytest.fixture
def fewer_prompts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Half of the prompts, still more rows than a wide tile has: torch is slow without llorch's kernels."""
    monkeypatch.setattr(reproducible_runs, "LENGTHS", LENGTHS[: len(LENGTHS) // 2])
    return len(LENGTHS) // 2


@pytest.mark.nightly_cases("bfloat16-micro-qwen3-torch", "float32-micro-llama-torch")
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize(("dtype", "name"), [("float32", "micro-llama"), ("bfloat16", "micro-qwen3")])
def test_logits_do_not_depend_on_batch_padding_or_prompt_chunks_bit_for_bit(dtype, name, is_compiled, request):
    # the fixture shortens what `verdict` runs
    n_prompts = len(LENGTHS) if is_compiled else request.getfixturevalue("fewer_prompts")
    assert verdict(dtype, name, own_kernels=is_compiled)[:2] == (n_prompts, 1)


IN_THREADS = [("float32", "micro-qwen3"), ("bfloat16", "micro-llama")]
TWO_THREADS = """
import json, sys, torch
from helpers.reproducible_runs import verdict
torch.set_num_threads(2)
print(json.dumps([verdict(*given) for given in json.loads(sys.argv[1])]))
"""


@cache
def verdicts_with_two_threads() -> list[tuple[int, int, str]]:
    """Verdicts of a process whose threads do not wait by spinning, which they must be told before torch is loaded."""
    paths = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests/support")))
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS, json.dumps(IN_THREADS)], capture_output=True, text=True, timeout=600,
        check=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2", "PYTHONPATH": paths},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize(("dtype", "name"), IN_THREADS)
def test_logits_do_not_depend_on_the_number_of_threads(dtype, name):
    company, cut, digest = verdicts_with_two_threads()[IN_THREADS.index((dtype, name))]
    assert (company, cut) == (len(LENGTHS), 1)
    prompt = (runner(name, DTYPES[dtype]).prompts()[3] * 4)[:140]
    assert sha256(runner(name, DTYPES[dtype]).passes(prompt, 140)) == digest


@pytest.mark.usefixtures("fewer_prompts")
def test_logits_do_not_depend_on_batch_without_a_compiler(monkeypatch):
    monkeypatch.setattr(reproducible, "library", lambda: None)
    run = runner("micro-qwen3")
    assert {type(part) for part in run.model.modules()} >= {CpuLinear, FixedRows, FixedNorm}
    assert len(hashes_when_cut(run, run.prompts()[3])) == 1
    assert all(len(seen) == 1 for seen in hashes_in_company(run))


def test_default_mode_fails_this_test():
    plain = runner(fixed=False)
    assert any(len(seen) > 1 for seen in hashes_in_company(plain))
    assert len(hashes_when_cut(plain, plain.prompts()[3])) > 1


def test_reproducible_logits_are_as_close_to_float64_as_default_ones():
    prompt = runner().prompts()[3]
    model = load("micro-qwen2")
    model.weights = model.weights.astype(np.float64)
    reference = torch.from_numpy(model.forward(prompt))
    error = {
        fixed: float((runner(fixed=fixed).passes(prompt, len(prompt)) - reference).norm() / reference.norm())
        for fixed in (True, False)
    }
    assert error[True] < max(1.5 * error[False], 1e-6)


@pytest.mark.nightly_cases("torch-bfloat16", "torch-float32")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
def test_packed_weights_are_reproducible_too(is_compiled, dtype, tmp_path: Path):
    model = load_packed(open_weights(write_model("Q4_K", tmp_path)), dtype=dtype, device=CPU)
    make_reproducible(model, own=is_compiled)
    run = Runner(model, dtype)
    prompt = run.prompts()[3]
    assert hashes_when_cut(run, prompt) == {sha256(run.batch([run.prompts()[0], prompt], "right")[1])}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_logits_do_not_depend_on_batch_on_cuda(dtype):

    device = torch.device("cuda", 0)
    model = load_dense(open_weights(builtin_path("micro-qwen3")), dtype=dtype, device=device)
    make_reproducible(model)
    run = Runner(model, dtype, device)
    assert run.passes([1, 2], 2).device == device
    assert [len(seen) for seen in hashes_in_company(run)] == [1] * len(LENGTHS)
    assert len(hashes_when_cut(run, run.prompts()[3])) == 1


class FaultyKernel(torch.nn.Linear):
    """A projection that adds the terms of some rows in another order, as some libraries do; all sums are our own."""

    def __init__(self, some_rows: Callable[[torch.Tensor], torch.Tensor], n_in: int, n_out: int, **kwargs: Any) -> None:
        super().__init__(n_in, n_out, **kwargs)
        self.some_rows, self.seen = some_rows, []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(input))
        terms = input.float()[:, None] * self.weight.float()  # (rows, out, in)
        made, rows = tree_sum(terms), self.some_rows(input)
        if rows.any():
            made[rows] = tree_sum(terms[rows].unflatten(-1, (2, -1)).mT.flatten(-2))
        return (made + self.bias.float()).to(input.dtype)


HABITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # the rows that a kernel adds in another order
    "odd rows": lambda x: torch.arange(len(x)) % 2 == 1,
    "the last row of eight": lambda x: torch.arange(len(x)) % 8 == 7,
    "rows above zeros": lambda x: (x.roll(-1, 0) == 0).all(1),
    "odd rows, with two threads": lambda x: torch.arange(len(x)) % torch.get_num_threads() == 1,
}
TILES = {  # rows added in another order: the numbers of rows with which the projection may be called
    "none": (lambda x: torch.zeros(len(x), dtype=torch.bool), {128, 8}),
    "all of a wide product": (lambda x: torch.full([len(x)], len(x) > 100), {8}),
    "the last eight of a wide product": (lambda x: torch.arange(len(x)) >= 120, {8}),
} | {habit: (rows, {1}) for habit, rows in HABITS.items()}
HALF_TOO = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.mark.slow_cases(
    but=[
        "10-none-float32",
        "2-none-bfloat16",
        "2-odd rows, with two threads-bfloat16",
        "2-the last eight of a wide product-bfloat16",
    ]
)
@HALF_TOO
@pytest.mark.parametrize("habit", TILES)
@pytest.mark.parametrize("n_out", [2, 10])
def test_linear_computes_rows_alone_if_the_kernel_depends_on_position_or_size(habit, dtype, n_out, monkeypatch):
    monkeypatch.setattr(reproducible, "_FOUND", {})
    monkeypatch.setattr(reproducible, "ENOUGH", 16)  # results that show habits as plain as these
    torch.manual_seed(0)
    some_rows, sizes = TILES[habit]
    kernel = FaultyKernel(some_rows, 64, n_out, dtype=dtype)
    fixed, x = reproducible.FixedRows(kernel), torch.randn(3, 50, 64).to(dtype)
    with torch.no_grad():
        fixed(x)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as if (real ones spin): it is tried again
        fixed(x)
        kernel.seen.clear()
        together = fixed(x)
        assert set(kernel.seen) == sizes
        assert torch.equal(torch.cat([fixed(row) for row in x.flatten(0, 1).split(1)]), together.flatten(0, 1))
        torch.testing.assert_close(together, torch.nn.functional.linear(x, kernel.weight, kernel.bias))


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("habit", HABITS)
def test_adapter_computes_rows_alone_if_the_kernel_depends_on_position_or_size(
    habit: str, r: int, monkeypatch: pytest.MonkeyPatch
):
    def injected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kernel = FaultyKernel(HABITS[habit], *reversed(weight.shape))
        kernel.weight, kernel.bias = torch.nn.Parameter(weight), torch.nn.Parameter(torch.zeros(len(weight)))
        return kernel(x)

    monkeypatch.setattr(modules, "linear", injected)
    monkeypatch.setattr(reproducible, "_FOUND", {})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, weight = torch.randn(9, 64), torch.randn(r, 64)
    with torch.no_grad():
        alone = torch.cat([modules.fixed_product(row, weight) for row in x.split(1)])
        assert torch.equal(modules.fixed_product(x, weight), alone)


@pytest.mark.parametrize("head_dim", [6, 16])  # MKL's product of 64 keys with 6 columns differs by place on AVX2
@pytest.mark.parametrize("habit", ["of the library", "odd rows"])
def test_attention_computes_a_query_alone_on_faulty_kernels(habit: str, head_dim: int, monkeypatch: pytest.MonkeyPatch):
    def injected(tile: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        made, other = torch.matmul(tile, block), torch.matmul(tile.flip(-1), block.flip(-2))
        return torch.where(torch.arange(tile.shape[-2])[:, None] % 2 == 1, other, made)

    monkeypatch.setattr(reproducible, "_FOUND", {})
    if habit != "of the library":
        monkeypatch.setattr(reproducible, "matmul", injected)
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(1, *of, head_dim, generator=generator) for of in ((70, 6), (2, 70), (2, 70)))
    whole = reproducible.attention(q, keys, values, None, keep_nothing)
    for n in range(1, 70):
        visible = (torch.arange(70) <= n).view(1, 1, 1, 70)
        assert torch.equal(
            reproducible.attention(q[:, n : n + 1], keys, values, visible, keep_nothing)[0, 0], whole[0, n]
        )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


Norm = TypeVar("Norm", bound=torch.nn.Module)


def with_gain(norm: Norm) -> Norm:
    norm.double().weight.data = random(6)
    return norm


def rms_norm_of_torch(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (6,), random(6), eps=1e-6)


FIXED_AND_TORCH = {
    "swiglu": (swiglu, lambda gate, up: functional.silu(gate) * up, (random(3, 9), random(3, 9).flip(0))),
    "silu": (fixed_order.silu, functional.silu, (40 * random(50),)),
    "sigmoid": (fixed_order.sigmoid, torch.sigmoid, (40 * random(50),)),
    "softplus": (fixed_order.softplus, lambda x: functional.softplus(x, threshold=200), (40 * random(50),)),
    "l2_norm": (fixed_order.l2_norm, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), (random(3, 7),)),
    "norm": (FixedNorm(with_gain(RMSNorm(6, 1e-6))), rms_norm_of_torch, (random(3, 6),)),
    "norm of heads": (
        fixed_order.FixedHeadNorm(1e-6),
        lambda x: functional.rms_norm(x, (7,), eps=1e-6),
        (random(1, 2, 3, 7),),
    ),
    "gated norm": (
        fixed_order.FixedGatedNorm(with_gain(delta_net.GatedNorm(6, 1e-6))),
        lambda x, z: rms_norm_of_torch(x) * functional.silu(z),
        (random(3, 6), random(3, 6).flip(0)),
    ),
    "normalised": (fixed_order.normalised, lambda x: functional.normalize(x, p=1, dim=-1), (random(2, 3, 5).abs(),)),
    "mixed": (
        fixed_order.mixed,
        lambda outputs, weights: torch.einsum("bskw,bsk->bsw", outputs, weights),
        (random(2, 3, 5, 7), random(2, 3, 5)),
    ),
}


@pytest.mark.parametrize("name", FIXED_AND_TORCH)
def test_fixed_order_function_equals_torch(name: str):
    fixed, of_torch, arguments = FIXED_AND_TORCH[name]
    torch.testing.assert_close(fixed(*arguments), of_torch(*arguments), rtol=1e-13, atol=1e-13)


def test_fixed_order_delta_rule_equals_the_chunked_one():  # which goldens judge
    rows = random(2, 9, 2, 3), random(2, 9, 2, 3).flip(1), random(2, 9, 4, 5)
    of_heads = random(2, 9, 4).sigmoid(), -random(2, 9, 4).abs()
    arguments = (*rows, *of_heads, random(2, 4, 3, 5))
    fixed, chunked = (rule(*arguments) for rule in (fixed_order.delta_rule, delta_rule.delta_rule))
    torch.testing.assert_close(fixed, chunked, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1.2e-7), (torch.float64, 2.3e-16)])
def test_exp_is_accurate_to_one_ulp_and_underflows_to_zero(dtype, tolerance):
    x = torch.linspace(-86, 86, 100_001, dtype=dtype)
    expected = np.exp(x.numpy().astype(np.longdouble))
    assert float(np.abs((exp(x).numpy() - expected) / expected).max()) < tolerance
    ends = exp(torch.tensor([-math.inf, -1000.0, 0.0, math.inf, math.nan], dtype=dtype))
    assert ends[:3].tolist() == [0.0, 0.0, 1.0]
    assert ends[3].isfinite()
    assert ends[4].isnan()


def test_swiglu_and_norms_of_a_row_do_not_depend_on_its_position():
    x = torch.randn(40, 37, generator=torch.Generator().manual_seed(0))  # a width that no vector register divides
    for function in (FixedNorm(RMSNorm(37, 1e-6)), lambda rows: swiglu(rows, rows)):
        assert torch.equal(torch.cat([function(row) for row in x.split(1)]), function(x))
    assert not torch.equal(torch.cat([plain_swiglu(row, row) for row in x.split(1)]), plain_swiglu(x, x))


def test_tree_sum_takes_any_width():
    for width in (1, 2, 3, 7, 64, 100):
        x = torch.arange(2 * width, dtype=torch.float64).view(2, width)
        assert tree_sum(x).tolist() == x.sum(-1).tolist()


def test_softmax_of_masked_keys_is_exactly_zero_for_any_number_of_keys():
    row = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    longer = torch.nn.functional.pad(row, (0, 100), value=-math.inf)
    assert torch.equal(softmax(longer)[:, :70], softmax(row))
    assert torch.equal(softmax(longer)[:, 70:], torch.zeros(5, 100))
    torch.testing.assert_close(softmax(row), row.softmax(-1))
