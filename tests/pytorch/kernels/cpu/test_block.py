from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from helpers.refusals import refuses
from torch import Tensor, nn

from llorch.files import open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.pytorch.batch_invariant.reproducible import make_reproducible
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, keep_nothing
from llorch.pytorch.kernels.cpu.block import CpuBlock
from llorch.pytorch.kernels.cpu.layer import FEW
from llorch.pytorch.kernels.cpu.linear import CpuLinear
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.table import install_kernels, kernels_for
from llorch.pytorch.load import load_dense, load_packed
from llorch.pytorch.serving.paged_cache import PagedCache, SequenceRow
from llorch.pytorch.serving.pages import PAGE
from llorch.runtime.builtin import builtin_path

CPU = torch.device("cpu")
FIRST = 50


def model_with_cpu_kernels(name: str, dtype: torch.dtype) -> CausalLM:
    model = load_dense(open_weights(builtin_path(name)), dtype=dtype, device=CPU)
    use_sdpa(model)
    install_kernels(model, kernels_for(CPU, dtype, required=False))
    return model


def reproducible_model(name: str, dtype: torch.dtype) -> CausalLM:
    model = load_dense(open_weights(builtin_path(name)), dtype=dtype, device=CPU)
    make_reproducible(model)
    return model


def observe(name: str, array: Tensor) -> Tensor:
    return array


def continue_generation(
    model: CausalLM, dtype: torch.dtype, keep: Callable[[str, Tensor], Tensor], seq: int = 1
) -> Tensor:
    """Logits of some steps of a ragged batch of two, after a prompt."""
    cache = Cache(model.config, batch=2, n_slots=20, dtype=dtype, device=CPU, first_position=FIRST)
    ids = torch.arange(40).view(2, 20)
    positions = FIRST + torch.arange(20).expand(2, 20) - torch.tensor([[0], [2]])
    positions[1, :2] = -1
    made = [model(ids[:, :8], cache.place(positions[:, :8], ctx=8), cache, keep=keep)]
    for start in range(8, 20, seq):
        new = slice(start, start + seq)
        made.append(model(ids[:, new], cache.place(positions[:, new], ctx=start + seq), cache, keep=keep))
    return torch.cat(made, dim=1)


def blocks(model: CausalLM) -> list[CpuBlock]:
    return [cast(CpuBlock, layer) for layer in model.model.layers]


def submodules(model: CausalLM) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__module__.startswith("llorch.pytorch.kernels.cpu")]


@pytest.mark.parametrize("seq", [1, FEW // 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen2", "micro-qwen3"])
@torch.no_grad()
def test_block_in_one_call_equals_its_kernels_bit_for_bit(name, dtype, seq):
    model = model_with_cpu_kernels(name, dtype)
    actual, expected = (
        continue_generation(model, dtype, keep_nothing, seq),
        continue_generation(model, dtype, observe, seq),
    )
    assert all(block._struct_cache[2] is not None for block in blocks(model))  # it was used
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen3"])
@torch.no_grad()
def test_reproducible_block_of_many_tokens_equals_its_kernels_bit_for_bit(name, dtype):
    model = reproducible_model(name, dtype)
    actual, expected = continue_generation(model, dtype, keep_nothing, 4), continue_generation(model, dtype, observe, 2)
    assert all(block._struct_cache[2] is not None for block in blocks(model))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("make", "seq"), [(model_with_cpu_kernels, 1), (reproducible_model, 1), (reproducible_model, 5)]
)
@torch.no_grad()
def test_paged_block_has_the_bits_of_a_block_with_gathered_context(make, seq, dtype):
    model, made = make("micro-qwen3", dtype), []
    filled, pages = (2 * PAGE - 3, 60), ((5, 2, 4), (1, 3))
    for keep in (keep_nothing, observe):
        cache = PagedCache(model.config, n_pages=5, n_states=2, n_positions=3 * PAGE, dtype=dtype, device=CPU)
        for row, (n, own) in enumerate(zip(filled, pages, strict=True)):
            model(torch.arange(row, row + n)[None], cache.begin([SequenceRow(own, row, 0)], n), cache)
        for step in range(3):  # into the next page
            rows = [
                SequenceRow(own, row, n + step * seq) for row, (n, own) in enumerate(zip(filled, pages, strict=True))
            ]
            made.append(model(torch.arange(2 * seq).view(2, seq) + step, cache.begin(rows, seq), cache, keep=keep))
            assert cache.pages is not None
        made.append(torch.cat([store for pool in cache._pools for store in pool]))
    assert all(torch.equal(actual, expected) for actual, expected in zip(made[:4], made[4:], strict=True))


@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_block_with_a_kernel_of_another_mode_is_not_one_call(fixed):
    model = (
        reproducible_model("micro-llama", torch.float32)
        if fixed
        else model_with_cpu_kernels("micro-llama", torch.float32)
    )
    block, kernel = blocks(model)[0], blocks(model)[0].mlp.up_proj
    block.mlp.up_proj = CpuLinear(kernel.weight, kernel.bias, kernel.library, fixed=not kernel.fixed)
    continue_generation(model, torch.float32, keep_nothing)
    assert [block._struct_cache[2] is None for block in blocks(model)] == [True, *[False] * (len(blocks(model)) - 1)]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@torch.no_grad()
def test_packed_block_in_one_call_equals_its_kernels_bit_for_bit(kind, tmp_path):
    model = load_packed(open_weights(write_model(kind, tmp_path)), dtype=torch.float32, device=CPU)
    use_sdpa(model)
    install_kernels(model, kernels_for(CPU, torch.float32, required=True))
    assert any(isinstance(part, CpuQuantisedLinear) for part in submodules(model))
    actual, expected = (continue_generation(model, torch.float32, keep) for keep in (keep_nothing, observe))
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_batch_without_a_mask_equals_a_batch_with_one():
    model = model_with_cpu_kernels("micro-llama", torch.float32)
    cache = Cache(model.config, batch=1, n_slots=6, dtype=torch.float32, device=CPU)
    ids = torch.arange(6)[None]
    whole = model(ids, cache.place(ids, ctx=6, causal=True), cache)
    for step in range(6):
        place = cache.place(ids[:, step : step + 1], ctx=step + 1, causal=True)
        row = model(ids[:, step : step + 1], place, cache)[0, 0]
        torch.testing.assert_close(row, whole[0, step], rtol=1e-4, atol=1e-5)


class DoublingKernel(nn.Module):
    def __init__(self, kernel: nn.Module) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.kernel(x)


def double_a_kernel(block: CpuBlock) -> None:
    block.mlp.down_proj = DoublingKernel(block.mlp.down_proj)


def replace_a_function(block: CpuBlock) -> None:
    block.mlp.act = torch.mul


def move_a_weight(block: CpuBlock) -> None:
    block.mlp.down_proj.weight.data = 2 * block.mlp.down_proj.weight.data


@pytest.mark.parametrize("change", [double_a_kernel, replace_a_function, move_a_weight])
@torch.no_grad()
def test_later_replacement_of_a_module_is_detected(change: Callable[[CpuBlock], None]):
    model = model_with_cpu_kernels("micro-llama", torch.float32)
    before = continue_generation(model, torch.float32, keep_nothing)
    change(blocks(model)[1])
    after = continue_generation(model, torch.float32, keep_nothing)
    assert not torch.allclose(after, before)
    assert torch.equal(after, continue_generation(model, torch.float32, observe))


@torch.no_grad()
def test_a_slot_that_does_not_exist_is_refused():
    model = model_with_cpu_kernels("micro-llama", torch.float32)
    cache = Cache(model.config, batch=1, n_slots=6, dtype=torch.float32, device=CPU, first_position=10)
    with refuses(IndexError, where="cache", expected=(0, 6), got="[[-1]]"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache.place(torch.tensor([[9]]), ctx=1), cache)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_install_no_cpu_kernels(dtype):
    assert submodules(model_with_cpu_kernels("micro-llama", dtype)) == []


def test_module_and_weight_paths_stay_those_of_transformers():
    plain = load_dense(open_weights(builtin_path("micro-qwen2")), dtype=torch.float32, device=CPU)
    names, modules = list(plain.state_dict()), {name for name, _ in plain.named_modules()}
    install_kernels(plain, kernels_for(CPU, torch.float32, required=True))
    assert list(plain.state_dict()) == names
    assert {name for name, _ in plain.named_modules()} == modules


def test_products_use_onednn_without_a_compiler(monkeypatch):
    monkeypatch.setattr("llorch.pytorch.kernels.table.library", lambda: None)
    model = model_with_cpu_kernels("micro-llama", torch.float32)
    assert {type(part) for part in submodules(model)} == {CpuLinear}
    monkeypatch.undo()
    with torch.no_grad():
        actual, expected = (
            continue_generation(m, torch.float32, keep_nothing)
            for m in (model, model_with_cpu_kernels("micro-llama", torch.float32))
        )
    assert float((actual - expected).norm() / expected.norm()) < 1e-5
    assert np.isfinite(actual.numpy()).all()
