"""The reference engine `llamacpp` in half precision: what it rounds, what it does not, and what it refuses."""

import errno
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from builders.random_adapters import IDS as ADAPTER_IDS
from builders.random_adapters import random_adapter, tiny_base
from helpers.refusals import refuses

from llorch.engines import LoadPath, f32_copy
from llorch.engines import open_in_process as open_engine
from llorch.files import open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.gguf_format import write_lora_gguf
from llorch.ops.numerics import GGML, DtypeName
from llorch.ops.rounding import ActivationKind, round_activations
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.live

PATH = builtin_path("micro-qwen3")
IDS = (3, 17, 250, 9, 44, 101, 7, 88)
half = pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("float16", "F16")])


@half
def test_weights_and_inputs_of_products_are_rounded_and_nothing_else(dtype: DtypeName, kind: ActivationKind):
    with open_engine("llamacpp", PATH, dtype=dtype) as engine:
        trace = engine.trace(IDS)
        assert engine.provenance()["knobs"]["weights"] == kind  # type: ignore[index]
        assert engine.provenance()["knobs"]["type_k"] == "F32"  # type: ignore[index]
    weights = open_weights(PATH)
    up, down = (round_activations(weights.array(f"layers.0.{name}_proj"), kind) for name in ("up", "down"))
    for x, matrix, y in (("ffn_norm", up, "ffn_up"), ("ffn_act", down, "ffn_out")):
        expected = round_activations(trace[f"l0.{x}"], kind).astype(np.float64) @ matrix.T.astype(np.float64)
        assert np.linalg.norm(trace[f"l0.{y}"] - expected) < 1e-6 * np.linalg.norm(expected)
    stream = trace["l0.attn_residual"] + trace["l0.ffn_out"]
    np.testing.assert_array_equal(trace["l0.block_out"], stream)  # in float32
    assert (round_activations(stream, kind) != stream).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_full_disk_is_refused_with_the_dtype_before_writing(
    dtype: DtypeName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base, usage = tiny_base(tmp_path / "base"), shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(f32_copy.shutil, "disk_usage", lambda _path: usage)
    with refuses(OSError, dtype, "GB", "TMPDIR") as caught:
        open_engine("llamacpp", base, dtype=dtype)
    assert caught.value.errno == errno.ENOSPC


def test_unconverted_file_has_no_other_dtype():
    with refuses(ValueError, "ggml", "float16", where="llamacpp"):
        open_engine("llamacpp", PATH, numerics=GGML, dtype="float16")


def test_temporary_files_are_removed(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_engine("llamacpp", PATH, dtype="bfloat16") as engine:
        assert [file.name for folder in tmp_path.iterdir() for file in folder.iterdir()] == ["bfloat16.gguf"]
        engine.logits(IDS)
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_file_is_decoded_and_written_by_llama_cpp(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = write_model("Q4_K_M", tmp_path)
    monkeypatch.delattr(f32_copy, "write_gguf")
    with f32_copy.float_gguf(path, "float32") as (copy, _, load_path):
        assert load_path == LoadPath("llamacpp", "llamacpp", "llamacpp")
        ours, theirs = open_weights(path), open_weights(copy)
        assert {theirs.stored_type(name).name for name in theirs} == {"F32"}
        assert all(np.array_equal(ours.array(name), theirs.array(name)) for name in ours)
    (tmp_path / "damaged.gguf").write_bytes(path.read_bytes()[:-999])
    with refuses(RuntimeError, "status 1", where=("llama.cpp", tmp_path / "damaged.gguf")) as caught:
        f32_copy.write_by_llamacpp(tmp_path / "damaged.gguf", tmp_path / "copy.gguf", 0)
    assert re.search(r"status \d+", str(caught.value))


@pytest.fixture
def base_and_adapter(tmp_path):
    base = tiny_base(tmp_path / "base")
    config = open_weights(base).config
    write_lora_gguf(random_adapter(config), tmp_path / "a.gguf", config)
    return base, tmp_path / "a.gguf", config


def test_the_adapter_acts_on_every_run_and_on_its_stages(base_and_adapter):
    from llorch.engines.llamacpp import LlamaCpp, LlamaCppWithAdapter

    base, adapter, _ = base_and_adapter
    with LlamaCpp(base) as plain, LlamaCppWithAdapter(base, adapter) as adapted:
        logits = adapted.logits(ADAPTER_IDS)
        assert np.abs(logits - plain.logits(ADAPTER_IDS)).max() > 0.1
        np.testing.assert_allclose(adapted.selected_logits(ADAPTER_IDS), logits[-1], rtol=0, atol=1e-6)
        assert adapted.greedy(ADAPTER_IDS, 3) != plain.greedy(ADAPTER_IDS, 3)


def test_a_zero_adapter_gives_the_bits_of_the_base(base_and_adapter, tmp_path):
    from llorch.engines.llamacpp import LlamaCpp, logits_with_adapter

    base, _, config = base_and_adapter
    adapter = random_adapter(config)
    for lora in adapter.tensors.values():
        lora.lora_B[:] = 0
    write_lora_gguf(adapter, tmp_path / "zero.gguf", config)
    with LlamaCpp(base) as plain:
        adapted = logits_with_adapter(base, tmp_path / "zero.gguf", ADAPTER_IDS)
        np.testing.assert_array_equal(adapted, plain.logits(ADAPTER_IDS))


def test_llamacpp_refusal_raises_an_error_with_its_message(base_and_adapter, tmp_path):
    from llorch.engines.llamacpp import logits_with_adapter

    base, adapter, _ = base_and_adapter
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(adapter.read_bytes()[:200])
    with refuses(OSError, "adapter", where=cut):
        logits_with_adapter(base, cut, ADAPTER_IDS)
    with refuses(OSError, "adapter", where=adapter):
        logits_with_adapter("llorch/models/micro-qwen3.gguf", adapter, ADAPTER_IDS)
