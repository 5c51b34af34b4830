"""The reference engine `transformers`: its dtypes, models that it does not take; logits of an adapter in PEFT."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as container
from builders.random_adapters import IDS, adapted_logits, random_adapter, tiny_base
from builders.tiny_models import random_tensors, write_folder
from helpers.refusals import refuses

from llorch.engines import LoadPath
from llorch.engines import open_in_process as open_engine
from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.files.tensor_names import inventory
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.ops.numerics import DtypeName
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.live
TOKEN_IDS = (3, 17, 250, 9, 44, 101, 7, 88)


def test_config_refused_by_transformers_raises_one_line(tmp_path: Path):
    tensors = random_tensors("llama")  # three of the four heads of 8, on a hidden size of 32
    parts = {"q_proj": np.s_[:24], "o_proj": np.s_[:, :24], "k_proj": np.s_[:8], "v_proj": np.s_[:8]}
    tensors |= {n: t[cut].copy() for n, t in tensors.items() for part, cut in parts.items() if part in n}
    folder = write_folder(tmp_path / "m", tensors, num_attention_heads=3, num_key_value_heads=1, head_dim=8)
    write_gguf(open_weights(folder), tmp_path / "m.gguf")
    for path in (folder, tmp_path / "m.gguf"):
        with refuses(RuntimeError, "configuration", "hidden size (32)"):
            open_engine("transformers", path)


def significant_bits(array: np.ndarray) -> int:
    """The most bits that any of the numbers needs."""
    _, exponents = np.frexp(array)
    whole = np.ldexp(array.astype(np.float64), 24 - exponents).astype(np.int64)
    return next(bits for bits in range(24, 0, -1) if (whole & (1 << 24 - bits)).any())


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen2", "micro-qwen3"])
def test_a_run_in_half_precision_rounds_every_stage_and_keeps_the_frequencies(name: str, dtype: DtypeName, bits: int):
    with open_engine("transformers", builtin_path(name), dtype=dtype) as engine:
        trace = engine.trace(TOKEN_IDS)
        model = engine._model  # type: ignore[attr-defined]
        assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
        assert str(model.model.rotary_emb.inv_freq.dtype) == "torch.float32"
        assert engine.provenance()["knobs"]["dtype"] == dtype  # type: ignore[index]
        assert np.isfinite(engine.selected_logits(TOKEN_IDS)).all()
        assert engine.greedy(TOKEN_IDS, 3)
        np.testing.assert_array_equal(engine.logits(TOKEN_IDS), trace["logits"], strict=True)
    for key, array in trace.items():
        assert array.dtype == np.float32
        assert np.isfinite(array).all() != key.endswith("attn_scores")
        assert significant_bits(np.where(np.isfinite(array), array, 0)) <= bits, key
    assert significant_bits(trace["logits"]) == bits


def test_a_run_in_float32_needs_all_bits():
    with open_engine("transformers", builtin_path("micro-llama")) as engine:
        assert significant_bits(engine.trace(TOKEN_IDS)["logits"]) == 24


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_folder_and_a_file_of_the_same_weights_give_the_same_bits(tmp_path: Path, dtype: DtypeName):
    folder = write_folder(tmp_path / "m", random_tensors("llama"))
    write_gguf(open_weights(folder), tmp_path / "m.gguf")
    traces = []
    for path in (folder, tmp_path / "m.gguf"):
        with open_engine("transformers", path, dtype=dtype) as engine:
            traces.append(engine.trace((3, 1, 2), first_position=30))
            assert str(engine._model.model.rotary_emb.inv_freq.dtype) == "torch.float32"  # type: ignore[attr-defined]
    for key in traces[0]:
        np.testing.assert_array_equal(*(trace[key] for trace in traces), err_msg=key)


@pytest.mark.parametrize(
    ("name", "reader"), [("Q4_K_M", "transformers"), ("IQ4_NL", "transformers"), ("Q1_0", "llorch")]
)
def test_a_quantised_file_is_decoded_by_transformers_where_it_can(tmp_path: Path, name: str, reader: str, capfd):
    path = write_model(name, tmp_path)
    weights = open_weights(path)
    with open_engine("transformers", path) as engine:
        assert replace(engine.load_path, set_by_llorch=()) == LoadPath(reader, reader)
        state = engine._model.state_dict()  # type: ignore[attr-defined]
        for short, row in inventory(weights.config).items():
            np.testing.assert_array_equal(state[row.huggingface].numpy(), weights.array(short))
    assert capfd.readouterr() == ("", "")


def test_transformers_does_not_use_llorch_hyperparameters(monkeypatch: pytest.MonkeyPatch):
    right = open_weights(builtin_path("micro-llama3")).config
    wrong = replace(right, rms_norm_eps=1.1 * right.rms_norm_eps, rope_theta=1.00001 * right.rope_theta)
    monkeypatch.setattr("llorch.files.opening.config_from_gguf", lambda *_, **__: wrong)
    with open_engine("transformers", builtin_path("micro-llama3"), dtype="float64") as engine:
        settings = engine._model.config  # pyright: ignore[reportAttributeAccessIssue]
    assert settings.rms_norm_eps == right.rms_norm_eps
    assert settings.rope_parameters["rope_theta"] == right.rope_theta


def test_isolated_stages_follow_a_shifted_trace_and_all_are_required(
    monkeypatch: pytest.MonkeyPatch,
):
    with open_engine("transformers", builtin_path("micro-llama"), dtype="float64") as engine:
        trace = engine.trace(TOKEN_IDS)
        trace["l1.attn_context"] = 1.25 * trace["l1.attn_context"]
        found = engine.isolated(TOKEN_IDS, trace)  # pyright: ignore[reportAttributeAccessIssue]
        moved = {"l1.attn_context", "l1.attention"}
        assert {name for name, difference in found.items() if difference.error > 1e-9} == moved | {"l1.attn_out"}
        assert [found[name].error for name in sorted(moved)] == [pytest.approx(0.25)] * 2
        from llorch.engines.capture.capture import HUGGINGFACE  # needs torch

        monkeypatch.delitem(HUGGINGFACE, "output of lm_head")
        with refuses(RuntimeError, ["logits"], where="transformers"):
            engine.isolated(TOKEN_IDS, trace)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def base_and_adapter(tmp_path):
    base = tiny_base(tmp_path / "base")
    weights = open_weights(base)
    adapter = random_adapter(weights.config)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights))
    return base, tmp_path / "adapter", adapter


def test_gguf_base_equals_a_folder_base(base_and_adapter, tmp_path):
    from llorch.engines.peft import peft_logits

    base, folder, adapter = base_and_adapter
    write_gguf(open_weights(base), tmp_path / "base.gguf")
    for model in (base, tmp_path / "base.gguf"):
        expected = adapted_logits(base, adapter)
        actual = peft_logits(model, folder, IDS)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_unmatched_keys_are_an_error(base_and_adapter):
    from llorch.engines.peft import peft_logits

    base, folder, _ = base_and_adapter
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace("q_proj", "query"): array for name, array in container.load_file(path).items()}
    container.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RuntimeError, match="missing adapter keys"):
        peft_logits(base, folder, IDS)
