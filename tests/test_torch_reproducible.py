"""Reproducible mode: hashes of logits, whatever the company of a prompt and however it is cut."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from reproducible_runs import (
    CPU,
    DTYPES,
    LENGTHS,
    Runner,
    hashes_in_company,
    hashes_when_cut,
    runner,
    sha256,
    verdict,
    verdict_of_a_process,
)


@pytest.mark.parametrize(("dtype", "name"), [("float32", "micro-llama"), ("bfloat16", "micro-qwen3")])
def test_no_bit_of_a_logit_depends_on_the_batch_its_padding_or_how_a_prompt_is_cut(dtype, name):
    assert verdict(dtype, name) == (len(LENGTHS), 1)


@pytest.mark.parametrize(("dtype", "name"), [("float32", "micro-qwen3"), ("bfloat16", "micro-llama")])
def test_that_holds_with_two_threads_too(dtype, name):
    assert verdict_of_a_process(2, dtype, name) == (len(LENGTHS), 1)


def test_the_plain_model_does_not_pass_this_test():
    plain = runner(fixed=False)
    assert any(len(seen) > 1 for seen in hashes_in_company(plain))
    assert len(hashes_when_cut(plain, plain.prompts()[3])) > 1


def test_reproducible_logits_are_as_close_to_the_truth_as_the_plain_ones():
    from llorch.model import load

    prompt = runner().prompts()[3]
    model = load("micro-qwen2")
    model.weights = model.weights.astype(np.float64)
    truth = torch.from_numpy(model.forward(prompt))
    error = {
        fixed: float((runner(fixed=fixed).passes(prompt, len(prompt)) - truth).norm() / truth.norm())
        for fixed in (True, False)
    }
    assert error[True] < max(1.5 * error[False], 1e-6)


def test_packed_weights_are_reproducible_too(tmp_path: Path):
    from llorch.quantised_models import write_model
    from llorch.torch_backend.load import load_packed
    from llorch.torch_backend.reproducible import make_reproducible
    from llorch.weights import open_weights

    model = load_packed(open_weights(write_model("Q4_K", tmp_path)), dtype=torch.float32, device=CPU)
    make_reproducible(model)
    run = Runner(model, torch.float32)
    prompt = run.prompts()[3]
    assert hashes_when_cut(run, prompt) == {sha256(run.batch([run.prompts()[0], prompt], "right")[1])}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_no_bit_of_a_logit_depends_on_the_company_on_cuda(dtype):
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch finds no CUDA device")
    from llorch.builtin import builtin_path
    from llorch.torch_backend.load import load_dense
    from llorch.torch_backend.reproducible import make_reproducible
    from llorch.weights import open_weights

    device = torch.device("cuda", 0)
    model = load_dense(open_weights(builtin_path("micro-qwen3")), dtype=dtype, device=device)
    make_reproducible(model)
    run = Runner(model, dtype, device)
    assert run.passes([1, 2], 2).device == device
    assert [len(seen) for seen in hashes_in_company(run)] == [1] * len(LENGTHS)
    assert len(hashes_when_cut(run, run.prompts()[3])) == 1


class AddsInAnotherOrder(torch.nn.Linear):
    """A projection whose wide products differ from its narrow ones in the last bits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if len(input) < 100 else (input.flip(-1) @ self.weight.flip(-1).T)


def test_wide_products_are_used_only_where_they_have_the_bits_of_narrow_ones():
    from llorch.kernels.reproducible import WIDE_ROWS, wide_rows_agree

    probe = torch.randn(WIDE_ROWS, 320, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert wide_rows_agree(torch.nn.Linear(320, 64, bias=False), probe)
        assert not wide_rows_agree(AddsInAnotherOrder(320, 64, bias=False), probe)


def test_a_projection_sees_tiles_of_two_sizes_only():
    from llorch.kernels.reproducible import ROWS, WIDE_ROWS, FixedRows

    seen = []

    class Watched(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(len(input))
            return super().forward(input)

    leaf = Watched(6, 4)
    x = torch.randn(3, 50, 6)
    torch.testing.assert_close(FixedRows(leaf, wide=True)(x), torch.nn.Linear.forward(leaf, x))
    assert seen == [WIDE_ROWS, ROWS, ROWS, ROWS]
    seen.clear()
    FixedRows(leaf, wide=False)(x[:1, :9])
    assert seen == [ROWS, ROWS]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1.2e-7), (torch.float64, 2.3e-16)])
def test_exp_is_right_to_one_unit_in_the_last_place_and_ends_in_zero(dtype, tolerance):
    from llorch.kernels.reproducible import exp

    x = torch.linspace(-86, 86, 100_001, dtype=dtype)
    want = np.exp(x.numpy().astype(np.longdouble))
    assert float(np.abs((exp(x).numpy() - want) / want).max()) < tolerance
    ends = exp(torch.tensor([-math.inf, -1000.0, 0.0, math.inf, math.nan], dtype=dtype))
    assert ends[:3].tolist() == [0.0, 0.0, 1.0]
    assert ends[3].isfinite()
    assert ends[4].isnan()


def test_swiglu_and_norms_of_a_row_have_the_same_bits_wherever_it_stands():
    from llorch.kernels.reproducible import FixedNorm, swiglu
    from llorch.torch_model import RMSNorm
    from llorch.torch_model import swiglu as plain_swiglu

    x = torch.randn(40, 37, generator=torch.Generator().manual_seed(0))  # a width that no vector register divides
    norm = FixedNorm(RMSNorm(37, 1e-6))
    for function in (norm, lambda rows: swiglu(rows, rows)):
        assert torch.equal(torch.cat([function(row) for row in x.split(1)]), function(x))
    assert not torch.equal(torch.cat([plain_swiglu(row, row) for row in x.split(1)]), plain_swiglu(x, x))


def test_tree_sum_takes_any_width():
    from llorch.kernels.reproducible import tree_sum

    for width in (1, 2, 3, 7, 64, 100):
        x = torch.arange(2 * width, dtype=torch.float64).view(2, width)
        assert tree_sum(x).tolist() == x.sum(-1).tolist()


def test_softmax_gives_masked_keys_exactly_nothing_and_ignores_how_many_follow():
    from llorch.kernels.reproducible import softmax

    row = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    longer = torch.nn.functional.pad(row, (0, 100), value=-math.inf)
    assert torch.equal(softmax(longer)[:, :70], softmax(row))
    assert torch.equal(softmax(longer)[:, 70:], torch.zeros(5, 100))
    torch.testing.assert_close(softmax(row), row.softmax(-1))
