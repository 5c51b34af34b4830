import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.quantised_folders import FOLDERS, Tensors, changed
from helpers.command_line import REPOSITORY
from helpers.refusals import refuses
from helpers.split_runs import write_random_model

from llorch.files import Weights, open_weights, packed
from llorch.files.convert import convert
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.pytorch import load, stored_kinds
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.kernels.packing import CPU_BLOCK_TYPES, HALF_TYPES, decode
from llorch.pytorch.kernels.quantised_linear import PackedMatrix, QuantisedEmbedding, QuantisedLinear
from llorch.pytorch.kernels.table import install_kernels, kernels_for
from llorch.pytorch.load import LargePages, load_dense, load_packed
from llorch.pytorch.model import load_torch
from llorch.pytorch.models.experts import QuantisedExperts
from llorch.runtime.builtin import builtin_path

CPU = torch.device("cpu")
PACKED = [name for name, recipe in MODELS.items() if recipe.types <= {*CPU_BLOCK_TYPES}]


def logits(model: CausalLM, dtype: torch.dtype) -> torch.Tensor:
    ids = torch.tensor([[5, 26, 17, 33, 2, 19, 14, 38, 30]])
    cache = Cache(model.config, batch=1, n_slots=9, dtype=dtype, device=CPU)
    with torch.inference_mode():
        return model(ids, cache.place(torch.arange(9)[None], ctx=9, causal=True), cache)


def load_logits(path: Path, way: Callable[..., CausalLM], dtype: torch.dtype) -> CausalLM:
    return way(open_weights(path), dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*PACKED, "IQ3_S"])
def test_packed_matrices_give_the_logits_of_decoded_ones(name, dtype, tmp_path):
    path = write_model(name, tmp_path)
    packed, dense = (logits(load_logits(path, way, dtype), dtype).double() for way in (load_packed, load_dense))
    assert float((packed - dense).norm() / dense.norm()) < (1e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("name", PACKED)
def test_packed_model_of_another_dtype_gives_the_logits_of_one_loaded_in_it(name, tmp_path):
    path = write_model(name, tmp_path)
    changed, opened = (
        load_logits(path, load_packed, torch.float32).bfloat16(),
        load_logits(path, load_packed, torch.bfloat16),
    )
    assert torch.equal(logits(changed, torch.bfloat16), logits(opened, torch.bfloat16))


@pytest.mark.parametrize("name", PACKED)
def test_every_matrix_of_the_four_types_stays_packed(name, tmp_path):
    model = load_logits(write_model(name, tmp_path), load_packed, torch.bfloat16)
    assert not [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == 2 * 7 + 1
    assert isinstance(model.model.embed_tokens, QuantisedEmbedding)


def test_matrices_of_other_types_are_decoded(tmp_path):
    model = load_logits(write_model("IQ3_S", tmp_path), load_packed, torch.float32)
    assert not any(isinstance(module, QuantisedLinear | QuantisedEmbedding) for module in model.modules())


@pytest.mark.parametrize("ggml_type", [GGMLType.Q8_0, GGMLType.F16], ids=lambda kind: kind.name)
def test_a_tied_head_shares_the_memory_of_the_embedding(ggml_type, tmp_path):
    path = tmp_path / "tied.gguf"
    convert(builtin_path("micro-llama3"), path, ggml_type=ggml_type)
    model = load_logits(path, load_packed, torch.float32)
    head, embedding = (list(kernel.state_dict().values()) for kernel in (model.lm_head, model.model.embed_tokens))
    assert [tensor.data_ptr() for tensor in head] == [tensor.data_ptr() for tensor in embedding]
    packed, dense = (logits(either, torch.float32) for either in (model, load_logits(path, load_dense, torch.float32)))
    assert float((packed - dense).norm()) < 1e-4


@pytest.mark.parametrize("ggml_type", [GGMLType.BF16, GGMLType.F16], ids=lambda kind: kind.name)
def test_half_precision_matrices_stay_packed_only_in_float32(ggml_type, tmp_path):
    path = tmp_path / "half.gguf"
    convert(builtin_path("micro-llama"), path, ggml_type=ggml_type)
    kept, dense = (load_logits(path, way, torch.float32) for way in (load_packed, load_dense))
    assert not [name for name, parameter in kept.named_parameters() if parameter.ndim > 1]
    for kernel in (kernel for kernel in kept.modules() if isinstance(kernel, QuantisedLinear | QuantisedEmbedding)):
        assert (kernel.ggml_type, kernel.fields["codes"].dtype) == (ggml_type, HALF_TYPES[ggml_type])
    assert torch.equal(logits(kept, torch.float32), logits(dense, torch.float32))
    for dtype in (torch.bfloat16, torch.float64):
        assert not any(
            isinstance(kernel, QuantisedLinear) for kernel in load_logits(path, load_packed, dtype).modules()
        )


@pytest.mark.parametrize("ggml_type", [GGMLType.BF16, GGMLType.F16], ids=lambda kind: kind.name)
def test_shard_of_a_half_precision_matrix_stays_packed_only_with_full_column_runs(ggml_type, tmp_path):
    weights = open_weights(write_random_model(tmp_path, ggml_type, intermediate_size=192))

    def second_of(n_ranks: int) -> torch.nn.Module:
        def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(n_ranks, 1)[1].clone() if path.endswith("down_proj.weight") else tensor

        model = load_packed(weights, dtype=torch.float32, device=CPU, cut=cut)
        install_kernels(model, kernels_for(CPU, torch.float32, required=False))
        return model.get_submodule("model.layers.0.mlp.down_proj")

    whole = torch.from_numpy(weights.read("layers.0.down_proj"))
    for n_ranks, half in ((2, True), (4, False)):  # 96 columns, or 48
        part, kernel = whole.chunk(n_ranks, 1)[1], second_of(n_ranks)
        assert isinstance(kernel, PackedMatrix) is half
        x = torch.linspace(-1, 1, part.shape[1])[None]
        torch.testing.assert_close(kernel(x), x @ part.T)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_those_of_the_file_in_the_order_of_the_model(name, tmp_path):
    weights = open_weights(write_model(name, tmp_path))
    model = load_packed(weights, dtype=torch.float32, device=CPU)
    for projection in ("q_proj", "v_proj"):
        kernel = model.get_submodule(f"model.layers.0.self_attn.{projection}")
        assert isinstance(kernel, QuantisedLinear)
        decoded, stored = decode(kernel.fields, kernel.ggml_type), weights.as_stored(f"layers.0.{projection}").by_row
        assert torch.equal(decoded, torch.from_numpy(weights.array(f"layers.0.{projection}")))
        assert projection == "q_proj" or np.array_equal(kernel.fields["blocks"].numpy(), stored)


def test_packed_experts_give_the_logits_of_decoded_ones(tmp_path: Path):
    moe = open_weights(builtin_path("micro-qwen3-moe")).config
    assert moe.experts is not None
    path = write_random_model(tmp_path, GGMLType.Q8_0, moe, head_dim=32, experts=replace(moe.experts, expert_size=32))
    packed, dense = (load_logits(path, way, torch.float32) for way in (load_packed, load_dense))
    assert any(isinstance(module, QuantisedExperts) for module in packed.modules())
    torch.testing.assert_close(logits(packed, torch.float32), logits(dense, torch.float32), rtol=1e-5, atol=1e-5)


def test_rows_of_q_and_k_in_another_order_give_other_logits(tmp_path, monkeypatch):
    path = write_model("Q4_K", tmp_path)
    right = logits(load_logits(path, load_packed, torch.float32), torch.float32)
    monkeypatch.setattr(stored_kinds, "undo_interleave", lambda rows, heads: rows.copy())
    assert (
        float((logits(load_logits(path, load_packed, torch.float32), torch.float32) - right).norm() / right.norm())
        > 0.01
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("name", "offset"), [("Q8_0", 0), ("Q4_0", 0), ("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208)])
def test_non_finite_scale_is_refused_as_with_decoded_matrices(name, offset, bad, tmp_path):
    path = write_model(name, tmp_path)
    weights = open_weights(path)
    raw = weights.source.packed("blk.1.ffn_up.weight").raw
    data = bytearray(path.read_bytes())
    start = data.index(raw.tobytes()) + raw.size // 2  # at the begin of a row
    data[start + offset : start + offset + 2] = np.array(bad, "<f2").tobytes()
    weights.source.close()
    path.write_bytes(data)
    messages = []
    for way in (load_packed, load_dense):
        with refuses("NonFinite", "(256, 0)", where="blk.1.ffn_up.weight") as caught:
            load_logits(path, way, torch.float32)
        assert re.search(r"\b(nan|inf)\b", str(caught.value))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_loading_initialises_no_random_weights(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "normal_", None)
    monkeypatch.setattr(torch.Tensor, "uniform_", None)
    assert load_logits(builtin_path("micro-qwen2"), load_dense, torch.float32).lm_head.weight.isfinite().all()


@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen3", "story"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_load_rounds_each_number_once(name: str, dtype: torch.dtype):
    weights = open_weights(builtin_path(name))
    wanted = dict(load_dense(weights, dtype=torch.float32, device=CPU).named_parameters())
    for parameter, tensor in load_dense(weights, dtype=dtype, device=CPU).named_parameters():
        assert torch.equal(tensor, wanted[parameter].to(tensor.dtype)), parameter


def test_half_precision_load_never_holds_a_matrix_in_float32(monkeypatch: pytest.MonkeyPatch):
    weights = open_weights(FOLDERS / "gptq-4bit")
    monkeypatch.setattr(packed, "TILE", 64)

    def read_vector(name: str, dtype: type[np.floating] = np.float32) -> np.ndarray:
        assert len(weights.shape(name)) == 1, name
        return Weights.read(weights, name, dtype)

    monkeypatch.setattr(weights, "read", read_vector)
    assert load_packed(weights, dtype=torch.bfloat16, device=CPU).model.embed_tokens.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00], ids=["NaN", "infinity"])
def test_half_precision_load_refuses_a_number_that_is_not_finite(bits: int, tmp_path: Path):
    def spoil(tensors: Tensors) -> None:
        dtype, shape, data = tensors["lm_head.weight"]
        assert dtype == "F16"
        tensors["lm_head.weight"] = dtype, shape, data[:-2] + bits.to_bytes(2, "little")

    weights = open_weights(changed(tmp_path, "gptq-4bit", tensors=spoil))
    with refuses("NonFinite", "lm_head.weight", "(23, 63)"):
        load_packed(weights, dtype=torch.bfloat16, device=CPU)


def test_process_without_sharding_does_not_import_dtensor():
    run = "import llorch.pytorch.model as m; m.load_torch(sys.argv[1]).forward([1, 2])"
    commands = "import llorch.cli.on_torch, llorch.apps.bench.torch, llorch.pytorch.train.trainer"
    code = f"import sys; {run}; {commands}; print(*sys.modules)"
    command = [sys.executable, "-c", code, str(builtin_path("micro-llama"))]
    modules = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.split()
    assert "torch" in modules
    assert "torch.distributed.tensor" not in modules


@pytest.mark.parametrize("load", [load_dense, load_packed])
def test_zeros_across_two_tensors_are_refused_however_the_matrices_are_read(load: Callable, tmp_path: Path):
    path = write_model("Q8_0", tmp_path)
    entries = open_weights(path).source.entries_by_file()[0]
    gate = next(entry for entry in entries if entry.name == "blk.1.ffn_gate.weight")
    data, end = bytearray(path.read_bytes()), gate.offset + gate.n_bytes
    row_bytes = gate.n_bytes // gate.shape[0]
    data[end - 9 * row_bytes : end + 2 * row_bytes] = bytes(11 * row_bytes)
    path.write_bytes(data)
    with refuses("Truncated", gate.name, gate.shape[0] - 9, where=path):
        load(open_weights(path), dtype=torch.bfloat16, device=CPU)


def asks_for_large_pages(address: int) -> bool:
    """Look for the flag of MADV_HUGEPAGE in what Linux says of the memory at an address."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(side, 16) for side in first.split("-"))
            within = start <= address < end
        elif within and first == "VmFlags:":
            return "hg" in rest
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_copies_are_equal_and_lie_in_large_pages():
    fields = {
        "codes": torch.arange(1 << 16).to(torch.uint8).view(256, 256),
        "d": torch.rand(256, 64),
        "few": torch.rand(3),
    }
    made = LargePages().copied(fields)
    assert all(torch.equal(made[name], field) and made[name].dtype is field.dtype for name, field in fields.items())
    assert [asks_for_large_pages(made[name].data_ptr()) for name in ("codes", "d")] == [True, True]
    assert made["few"] is fields["few"]


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_tensors_do_not_overlap_and_a_full_chunk_is_followed_by_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "_CHUNK", 1 << 20)
    pages, wanted = (
        LargePages(),
        [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (700_001, 300_003, 1 << 21, 99_999)],
    )
    made = [pages.copied({"codes": codes})["codes"] for codes in wanted]
    assert all(torch.equal(ours, codes) for ours, codes in zip(made, wanted, strict=True))
    ends = sorted((ours.data_ptr(), ours.data_ptr() + len(ours)) for ours in made)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_tensor_allocated_in_large_pages_is_not_copied():
    pages = LargePages()
    codes = pages.empty(300, 256, dtype=torch.uint8)
    assert (codes.shape, codes.dtype, asks_for_large_pages(codes.data_ptr())) == ((300, 256), torch.uint8, True)
    made = pages.copied({"codes": codes, "d": torch.ones(300, 64)})
    assert made["codes"] is codes
    codes.fill_(7)
    assert bool((made["d"] == 1).all())


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_memory_is_freed_with_the_last_tensor_in_it():
    (made,) = LargePages().copied({"codes": torch.ones(1 << 20)}).values()
    address = made.data_ptr()
    assert asks_for_large_pages(address)
    del made
    assert not asks_for_large_pages(address)


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_a_system_without_large_pages_keeps_the_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    codes = torch.ones(1 << 20)
    assert LargePages().copied({"codes": codes})["codes"] is codes
    assert LargePages().empty(1 << 20, dtype=torch.uint8).shape == (1 << 20,)


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_a_process_without_memory_keeps_the_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "_CHUNK", 1 << 60)
    codes = torch.ones(1 << 20)
    assert LargePages().copied({"codes": codes})["codes"] is codes


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_packed_matrices_of_a_folder_lie_in_large_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "_LEAST", 0)
    module = load_torch(FOLDERS / "mlx-4bit", residency="packed", dtype="bfloat16").module
    codes = [one.get_buffer("codes") for one in module.modules() if isinstance(one, PackedMatrix)]
    assert codes
    assert all(asks_for_large_pages(field.data_ptr()) for field in codes)


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has such pages")
def test_codes_of_a_full_matrix_are_packed_in_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "_LEAST", 0)
    copies: list[torch.Tensor] = []
    copied = LargePages._copied

    def noted(pages: LargePages, tensor: torch.Tensor) -> torch.Tensor:
        made = copied(pages, tensor)
        if made is not tensor:
            copies.append(made)
        return made

    monkeypatch.setattr(LargePages, "_copied", noted)
    module = load_torch(FOLDERS / "mlx-4bit", residency="packed", dtype="bfloat16").module
    codes = {one.get_buffer("codes").data_ptr() for one in module.modules() if isinstance(one, PackedMatrix)}
    assert copies
    assert codes.isdisjoint(tensor.data_ptr() for tensor in copies)
