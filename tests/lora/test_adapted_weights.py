"""An adapter beside frozen weights, as arrays, and what `lora inspect` tells of it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as container
from builders.families import MICRO
from builders.random_adapters import EVERY, fresh, random_adapter, tiny_base
from helpers.refusals import assert_tells

from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import LoraTensors, checked
from llorch.lora.base import identity_of
from llorch.lora.config import LoraConfig
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import write_peft
from llorch.lora.summary import product_norm, summarise
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.ops.lora import LoraMatrix
from llorch.ops.numerics import GGML
from llorch.runtime.builtin import builtin_path

IDS = np.array([5, 60, 17, 33, 2, 91, 44])
ALL = (*EVERY, "embed_tokens", "lm_head")


@pytest.fixture(params=MICRO)
def weights(request: pytest.FixtureRequest) -> Weights:
    return open_weights(builtin_path(request.param))


def logits(weights: Weights) -> np.ndarray:
    return forward(IDS, weights, KVCache(weights.config, weights.dtype))


def test_a_fresh_adapter_changes_no_bit_of_the_logits(weights: Weights):
    adapter = fresh(random_adapter(weights.config, target_modules=ALL))
    np.testing.assert_array_equal(logits(AdaptedWeights(weights, adapter)), logits(weights))


def test_an_adapter_on_any_one_matrix_changes_the_logits(weights: Weights):
    plain = logits(weights)
    for name in ALL:
        adapted = AdaptedWeights(weights, random_adapter(weights.config, target_modules=(name,)))
        assert np.abs(logits(adapted) - plain).max() > 1e-3, name


def test_dora_with_the_lengths_of_the_base_and_B_of_zeros_changes_nothing_beyond_rounding(weights: Weights):
    wide = weights.astype(np.float64)
    adapter = random_adapter(weights.config, target_modules=ALL, use_dora=True)
    parameters = {}
    for name, array in adapter.flat().items():
        target = adapter.targets[name.rpartition(".")[0]]
        lengths = np.linalg.norm(wide.array(target.weight), axis=0 if target.is_embedding else 1)
        parameters[name] = {"lora_A": array, "lora_B": 0 * array, "magnitude": lengths}[name.rpartition(".")[2]]
    actual = logits(AdaptedWeights(wide, adapter, parameters=parameters))
    np.testing.assert_allclose(actual, logits(wide), rtol=0, atol=1e-12)


def test_neither_the_base_nor_the_file_changes(weights: Weights):
    before = {name: array.copy() for name, array in ((name, weights.array(name)) for name in weights)}
    digest = hashlib.sha256(Path(weights.path).read_bytes()).digest()
    plain = logits(weights)
    logits(AdaptedWeights(weights, random_adapter(weights.config, target_modules=ALL, use_dora=True)))
    np.testing.assert_array_equal(logits(weights), plain)
    for name, array in before.items():
        np.testing.assert_array_equal(weights.array(name), array, err_msg=name)
    assert hashlib.sha256(Path(weights.path).read_bytes()).digest() == digest


def test_weight_without_adapter_is_the_array_of_the_base(weights: Weights):
    adapter = random_adapter(weights.config, target_modules=("q_proj",), layers_to_transform=(1,))
    adapted = AdaptedWeights(weights, adapter)
    assert [name for name in weights if isinstance(adapted[name], LoraMatrix)] == ["layers.1.q_proj"]
    assert adapted["layers.1.q_proj"].base is weights["layers.1.q_proj"]
    assert adapted.layer(1)["q_proj"] is adapted["layers.1.q_proj"]
    assert adapted["layers.0.q_proj"] is weights["layers.0.q_proj"]


def test_tied_embedding_has_both_adapters_and_an_untied_one_its_adapter():
    tied, untied = (open_weights(builtin_path(name)) for name in ("micro-llama3", "micro-llama"))
    both = AdaptedWeights(tied, random_adapter(tied.config, target_modules=("embed_tokens", "lm_head")))
    assert both["embed_tokens"].lora is not None
    assert both["embed_tokens"].embedding_lora is not None
    apart = AdaptedWeights(untied, random_adapter(untied.config, target_modules=("embed_tokens", "lm_head")))
    assert apart["embed_tokens"].lora is None
    assert apart["lm_head"].embedding_lora is None


def test_another_dtype_keeps_the_adapter_within_rounding(weights: Weights):
    adapted = AdaptedWeights(weights, random_adapter(weights.config, target_modules=ALL, use_dora=True))
    wide, narrow = logits(adapted.astype(np.float64)), logits(adapted)
    assert (wide.dtype, narrow.dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=3e-5 * np.abs(wide).max())


def test_parameters_replace_the_adapter_tensors_in_their_precision(weights: Weights):
    wide = weights.astype(np.float64)
    one, other = (random_adapter(weights.config, target_modules=ALL, seed=seed) for seed in (0, 1))
    swapped = AdaptedWeights(wide, one, parameters=other.flat())
    np.testing.assert_array_equal(logits(swapped), logits(AdaptedWeights(wide, other)))
    a_little_more = {name: array * np.float64(1 + 1e-12) for name, array in other.flat().items()}
    assert (logits(AdaptedWeights(wide, one, parameters=a_little_more)) != logits(swapped)).any()
    assert (logits(swapped.astype(np.float64)) == logits(swapped)).all()


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_adapter_on_a_packed_base_equals_the_decoded_base(tmp_path: Path, kind: str, use_dora: bool):
    dense = open_weights(write_model(kind, tmp_path)).astype(np.float64)
    adapter = random_adapter(dense.config, target_modules=ALL, use_dora=use_dora)
    packed = AdaptedWeights(dense.using(packed=True), adapter)
    assert not isinstance(packed["layers.0.q_proj"].base, np.ndarray)
    expected = logits(AdaptedWeights(dense, adapter))
    np.testing.assert_allclose(logits(packed), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    np.testing.assert_allclose(
        packed["layers.1.down_proj"].dequantize(), AdaptedWeights(dense, adapter)["layers.1.down_proj"].dequantize(),
        rtol=0, atol=1e-14,
    )  # fmt: skip


def test_ggml_numerics_of_the_base_are_kept_and_the_adapter_itself_is_not_rounded(tmp_path: Path):
    base = open_weights(write_model("Q8_0", tmp_path))
    adapted = AdaptedWeights(base, random_adapter(base.config)).using(GGML, packed=True)
    matrix, x = adapted["layers.0.q_proj"], np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
    assert matrix.activations == "Q8_0"
    actual = matrix.forward(x) - base.using(GGML, packed=True)["layers.0.q_proj"].forward(x)
    expected = x @ matrix.lora.lora_A.T @ matrix.lora.lora_B.T * matrix.lora.scaling
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


LORA = LoraConfig(r=2, lora_alpha=3.0, target_modules=("q_proj", "embed_tokens"), rank_pattern={r"layers\.1\..*": 3})


def tensors(config: ModelConfig, rng: np.random.Generator, lora: LoraConfig = LORA) -> dict[str, LoraTensors]:
    found = {}
    for name, target in lora.targets(config).items():
        rank = lora.rank_of(target)
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((rank, target.n_in), (target.n_out, rank)))
        found[name] = LoraTensors(a, b, np.ones(target.n_out, np.float32) if lora.use_dora else None)
    return found


def test_adapter_counts_its_parameters_and_names_them_in_order(config: ModelConfig, rng: np.random.Generator):
    adapter = checked(LORA, tensors(config, rng), config)
    q = [(config.hidden_size + config.q_width) * rank for rank in (2, 3, 2)]
    assert adapter.n_parameters == sum(q) + 2 * (config.vocab_size + config.hidden_size)
    assert list(adapter.flat())[:3] == ["embed_tokens.lora_A", "embed_tokens.lora_B", "layers.0.q_proj.lora_A"]
    assert adapter.scaling("layers.0.q_proj") == 1.5


def test_the_order_of_the_tensors_does_not_matter(config: ModelConfig, rng: np.random.Generator):
    backwards = dict(reversed(tensors(config, rng).items()))
    assert list(checked(LORA, backwards, config).tensors) == list(LORA.targets(config))


SETTINGS = {"target_modules": ("q_proj", "embed_tokens"), "use_rslora": True, "rank_pattern": {"q_proj": 5}}


@pytest.fixture
def saved_adapter(tmp_path):
    weights = open_weights(tiny_base(tmp_path / "base"))
    adapter = random_adapter(weights.config, **SETTINGS)
    write_peft(adapter, tmp_path / "adapter", base=identity_of(weights, "the base"))
    return tmp_path, weights, adapter


def test_norm_of_a_product_is_computed_from_its_factors(rng):
    lora_A, lora_B = rng.standard_normal((3, 20)), rng.standard_normal((30, 3))
    assert product_norm(lora_A, lora_B) == pytest.approx(np.linalg.norm(lora_B @ lora_A), rel=1e-12)


def test_summary_has_ranks_scales_and_norms_of_the_adapter(saved_adapter):
    folder, weights, adapter = saved_adapter
    summary = summarise(folder / "adapter", weights)
    assert summary.n_parameters == adapter.n_parameters
    assert (summary.base, summary.dtypes, summary.problems) == ("the base", ["F32"], [])
    by_path = {matrix.path: matrix for matrix in summary.matrices}
    assert by_path.keys() == {target.path for target in adapter.targets.values()}
    for name, target in adapter.targets.items():
        actual, tensors = by_path[target.path], adapter.tensors[name]
        delta = adapter.scaling(name) * tensors.lora_B @ tensors.lora_A
        assert (actual.rank, actual.scaling) == (adapter.config.rank_of(target), adapter.scaling(name))
        assert actual.norm == pytest.approx(np.linalg.norm(delta), rel=1e-5)
        assert actual.relative == pytest.approx(actual.norm / np.linalg.norm(weights.array(target.weight)), rel=1e-5)


def test_summary_of_a_gguf_file_has_the_same_norms(saved_adapter):
    folder, weights, adapter = saved_adapter
    write_lora_gguf(adapter, folder / "a.gguf", weights.config)
    norms = [sorted(m.norm for m in summarise(folder / name).matrices) for name in ("adapter", "a.gguf")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)
    assert summarise(folder / "a.gguf").base is None


def test_summary_names_incomplete_pairs_and_nan(saved_adapter):
    folder, _, _ = saved_adapter
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = container.load_file(path)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][0, 0] = np.nan
    container.save_file(tensors, path, {"format": "pt"})
    problems = summarise(folder / "adapter").problems
    half, odd = (next(one for one in problems if f"layers.{layer}." in one) for layer in (0, 1))
    assert_tells(half, "lora_A", "lora_B", where="model.layers.0.self_attn.q_proj")
    assert_tells(odd, "NaN", where="model.layers.1.self_attn.q_proj")
