"""Initial values of an adapter: PEFT's distributions, a seed per name, PiSSA's part of W; against PEFT, live."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import refuses
from helpers.training_passes import ALL, SETTINGS, base, batch, logits_of, peft_name

from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.lora.adapter import Adapter, LoraTensors, expected_shapes
from llorch.lora.config import LoraConfig
from llorch.lora.initial import INITS, initial_adapter, pissa_to_lora, principal
from llorch.pytorch.lora.adapters import adapter_of, attach, trainable_parameters
from llorch.runtime.builtin import builtin_path

EVERY = (*ALL, "embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return open_weights(builtin_path("micro-qwen2"))


def draw_adapter(weights: Weights, *, init: str = "default", seed: int = 0, **settings) -> Adapter:
    return initial_adapter(LoraConfig(**{"r": 4, "target_modules": EVERY} | settings), weights, init=init, seed=seed)


def qwen_05b() -> ModelConfig:
    return ModelConfig(
        family="qwen2", hidden_size=896, intermediate_size=4864, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64,
        vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_position_embeddings=32768,
        qkv_bias=True, o_bias=False, qk_norm=False, tie_word_embeddings=True,
    )  # fmt: skip


def test_rank_8_on_q_and_v_of_qwen_05b_trains_540672_numbers():
    shapes = expected_shapes(LoraConfig(r=8, target_modules=("q_proj", "v_proj")), qwen_05b())
    assert sum(map(math.prod, shapes.values())) == 540_672
    assert shapes["layers.23.v_proj.lora_B"] == (128, 8)


def test_by_default_a_is_uniform_and_b_is_zero(weights: Weights):
    tensors = draw_adapter(weights, r=64).tensors["layers.0.down_proj"]
    bound = 1 / np.sqrt(tensors.lora_A.shape[1])
    assert np.abs(tensors.lora_A).max() <= bound
    assert np.abs(tensors.lora_A).max() > 0.99 * bound
    np.testing.assert_allclose(tensors.lora_A.std(), bound / np.sqrt(3), rtol=0.02)
    assert not tensors.lora_B.any()


def test_gaussian_has_a_deviation_of_one_over_the_rank_of_the_matrix(weights: Weights):
    made = draw_adapter(weights, init="gaussian", r=32, rank_pattern={"up_proj": 16})
    for name, deviation in (("layers.0.q_proj", 1 / 32), ("layers.0.up_proj", 1 / 16)):
        np.testing.assert_allclose(made.tensors[name].lora_A.std(), deviation, rtol=0.05)
        assert abs(made.tensors[name].lora_A.mean()) < 0.1 * deviation
        assert not made.tensors[name].lora_B.any()


@pytest.mark.parametrize("init", INITS)
def test_embedding_adapter_has_normal_b_and_zero_a(weights: Weights, init: str):
    tensors = draw_adapter(weights, init=init, r=32).tensors["embed_tokens"]
    assert not tensors.lora_A.any()
    np.testing.assert_allclose(tensors.lora_B.std(), 1, rtol=0.05)


def test_tensor_depends_only_on_seed_and_name(weights: Weights):
    np.random.seed(1)  # noqa: NPY002 (the global state must not matter)
    whole, few = draw_adapter(weights), draw_adapter(weights, target_modules=("v_proj",))
    assert np.array_equal(whole.tensors["layers.2.v_proj"].lora_A, few.tensors["layers.2.v_proj"].lora_A)
    others = [t.lora_A for name, t in few.tensors.items() if name != "layers.2.v_proj"]
    others.append(draw_adapter(weights, seed=1).tensors["layers.2.v_proj"].lora_A)
    assert not any(np.array_equal(whole.tensors["layers.2.v_proj"].lora_A, other) for other in others)


def test_values_of_a_seed_are_fixed(weights: Weights):
    first = draw_adapter(weights, seed=7).tensors["layers.0.q_proj"].lora_A[0, :3]
    np.testing.assert_allclose(first, [0.045956016, -0.06341371, 0.0791408], rtol=1e-6)


@pytest.mark.parametrize("init", ["default", "gaussian"])
def test_dora_starts_from_the_lengths_of_the_base(weights: Weights, init: str):
    made = draw_adapter(weights, init=init, use_dora=True)
    for name, target in made.targets.items():
        expected = np.linalg.norm(weights[target.weight].astype(np.float64), axis=0 if target.is_embedding else 1)
        np.testing.assert_allclose(made.flat()[f"{name}.magnitude"], expected, rtol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_pissa_is_the_best_approximation_of_its_rank(weights: Weights, rslora: bool):
    made = draw_adapter(
        weights, init="pissa", use_rslora=rslora, rank_pattern={"k_proj": 2}, alpha_pattern={"o_proj": 3.0}
    )
    for name in ("layers.0.q_proj", "layers.1.k_proj", "layers.2.o_proj", "lm_head"):
        matrix, tensors = weights[made.targets[name].weight], made.tensors[name]
        rest = matrix - made.scaling(name) * tensors.lora_B.astype(np.float64) @ tensors.lora_A
        values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        np.testing.assert_allclose(np.linalg.norm(rest), np.linalg.norm(values[len(tensors.lora_A) :]), rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(tensors.lora_A), np.linalg.norm(tensors.lora_B), rtol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_exported_pissa_adds_nothing_at_the_start_and_the_full_change_later(weights: Weights, rslora: bool):
    start = draw_adapter(
        weights, init="pissa", use_rslora=rslora, alpha_pattern={"o_proj": 3.0}, rank_pattern={"k_proj": 2}
    )
    rng, moved = np.random.default_rng(0), {}
    for name, tensors in start.tensors.items():
        arrays = (a + 0.1 * rng.standard_normal(a.shape).astype(np.float32) for a in tensors.arrays().values())
        moved[name] = LoraTensors(*arrays)
    trained = replace(start, tensors=moved)
    plain = pissa_to_lora(trained, start, weights.config)
    for name, tensors in plain.tensors.items():
        actual, before, after = (delta(adapter, name) for adapter in (plain, start, trained))
        np.testing.assert_allclose(actual, after - before, atol=1e-6 * np.abs(after).max())
        assert len(tensors.lora_A) == 2 * len(start.tensors[name].lora_A)
        rest = delta(pissa_to_lora(start, start, weights.config), name)
        assert np.abs(rest).max() < 1e-6 * np.abs(before).max() + 1e-12


def delta(adapter: Adapter, name: str) -> np.ndarray:
    tensors = adapter.tensors[name]
    return adapter.scaling(name) * tensors.lora_B.astype(np.float64) @ tensors.lora_A.astype(np.float64)


RANKS = {"layers.0.v_proj": 2, "layers.1.v_proj": 2, "layers.1.up_proj": 5}  # of "patterns", where not 4
DRAWN = [(init, kind) for init in INITS for kind in SETTINGS if init != "pissa" or "use_dora" not in SETTINGS[kind]]


@pytest.mark.parametrize(("init", "kind"), DRAWN)
def test_every_init_has_the_requested_matrices_and_ranks_and_only_pissa_changes_the_logits(
    weights: Weights, init: str, kind: str
):
    settings = SETTINGS[kind]
    made = draw_adapter(weights, init=init, **settings)
    assert {name.rpartition(".")[2] for name in made.tensors} == {*settings["target_modules"]}
    for name in (name for name in made.tensors if not name.startswith("layers.2")):
        tensors, target = made.tensors[name], made.targets[name]
        added, weight = delta(made, name), weights[target.weight]
        assert len(tensors.lora_A) == (RANKS.get(name, 4) if kind == "patterns" else 4)
        assert (added.T if target.is_embedding else added).shape == weight.shape
        assert bool(added.any()) == (init == "pissa" and not target.is_embedding)
        assert all(np.isfinite(array).all() for array in tensors.arrays().values())
        assert (tensors.magnitude is not None) == settings.get("use_dora", False)


def test_unsupported_init_is_refused(weights: Weights):
    with refuses(ValueError, where="lora init", expected=INITS, got="'olora'"):
        draw_adapter(weights, init="olora")
    with refuses(ValueError, "seed", 0, where="lora init", got=-1):
        draw_adapter(weights, seed=-1)
    with refuses(ValueError, "pissa", "DoRA", where="lora init"):
        draw_adapter(weights, init="pissa", use_dora=True)
    with refuses(ValueError, "pissa", "rank", 32, where="layers.0.k_proj", got=33):
        draw_adapter(weights, init="pissa", r=33)


def test_the_principal_part_of_a_matrix_worked_by_hand():
    lora_A, lora_B = principal(np.diag([1.0, 8.0, 2.0]).astype(np.float32), rank=1, scaling=2.0, name="")
    np.testing.assert_allclose(2.0 * lora_B @ lora_A, np.diag([0.0, 8.0, 0.0]), atol=1e-6)
    np.testing.assert_allclose(np.abs(lora_A), [[0, 2, 0]], atol=1e-6)


PISSA = {
    "plain": {"target_modules": ALL},
    "rslora and patterns": {
        "target_modules": ("q_proj", "v_proj", "down_proj"), "use_rslora": True, "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"q_proj": 3.0},
    },
}  # fmt: skip


def peft_pissa(name: str, **settings: Any) -> Any:
    import peft

    from llorch.engines.transformers import Transformers

    config: Any = {"r": 4, "lora_alpha": 16.0} | settings
    config["target_modules"] = list(config["target_modules"])
    model = Transformers(builtin_path(name))._model
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights="pissa", **config)
    ).eval()


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly_cases(but=["micro-qwen2-rslora and patterns"])
@pytest.mark.parametrize("kind", PISSA)
@pytest.mark.parametrize("name", ["micro-llama", "micro-qwen2"])
def test_pissa_splits_every_matrix_as_peft_does(name: str, kind: str):
    weights, theirs = open_weights(builtin_path(name)), peft_pissa(name, **PISSA[kind])
    ours = draw_adapter(weights, init="pissa", **PISSA[kind])
    numbers = {key: parameter.detach().numpy() for key, parameter in theirs.named_parameters()}
    for key, tensors in ours.tensors.items():
        lora_A, lora_B = (numbers[peft_name(f"{key}.{side}", ours.targets)] for side in ("lora_A", "lora_B"))
        assert (lora_A.shape, lora_B.shape) == (tensors.lora_A.shape, tensors.lora_B.shape)
        product = tensors.lora_B @ tensors.lora_A  # singular vectors have no sign of their own
        np.testing.assert_allclose(product, lora_B @ lora_A, atol=2e-4 * np.abs(product).max())
        rest = weights[ours.targets[key].weight] - ours.scaling(key) * product
        stored = numbers[f"base_model.model.{ours.targets[key].path}.base_layer.weight"]
        np.testing.assert_allclose(rest, stored, atol=2e-4 * np.abs(stored).max())


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PISSA)
def test_exported_pissa_adapter_gives_the_logits_of_peft_on_its_residual_base(kind: str):
    module, theirs, of = base("micro-qwen2"), peft_pissa("micro-qwen2", **PISSA[kind]), batch()
    start = draw_adapter(open_weights(builtin_path("micro-qwen2")), init="pissa", **PISSA[kind])
    before = logits_of(module, of).detach()
    attach(module, start, trainable=True, minus=start)
    torch.testing.assert_close(logits_of(module, of).detach(), before, rtol=0, atol=1e-3)
    change_factors(module, theirs, start)
    expected = theirs(input_ids=torch.from_numpy(of.ids), use_cache=False).logits.detach()
    assert float((expected - before).abs().max()) > 0.1
    torch.testing.assert_close(logits_of(module, of).detach(), expected, rtol=0, atol=1e-3)
    plain = base("micro-qwen2")
    attach(plain, adapter_of(module))
    torch.testing.assert_close(logits_of(plain, of).detach(), expected, rtol=0, atol=1e-3)


def change_factors(module, peft_model, start) -> None:
    """Change the product of every adapter by the same matrix on both sides: their factors differ in sign."""
    numbers = dict(peft_model.named_parameters())
    ours = trainable_parameters(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key in start.tensors:
            left = torch.randn(len(start.tensors[key].lora_A), generator=generator)
            of_peft = [numbers[peft_name(f"{key}.{half}", start.targets)] for half in ("lora_B", "lora_A")]
            for side, other in ((ours[f"{key}.lora_B"], ours[f"{key}.lora_A"]), of_peft):
                signs = torch.sign(other[:, 0])  # fixes the sign of each pair of singular vectors
                side += 0.3 * left * signs * torch.ones(len(side), 1)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SETTINGS)
def test_shapes_and_counts_of_qwen_05b_equal_peft(kind: str):
    import peft
    import transformers

    model, settings = qwen_05b(), SETTINGS[kind]
    config = transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    plain: Any = settings | {"target_modules": [*settings["target_modules"]]}
    made = peft.LoraConfig(task_type="CAUSAL_LM", r=8, **plain)
    with torch.device("meta"):
        theirs = peft.get_peft_model(transformers.Qwen2ForCausalLM(config), made, low_cpu_mem_usage=True)
    lora = LoraConfig(r=8, **settings)
    named = {peft_name(key, lora.targets(model)): shape for key, shape in expected_shapes(lora, model).items()}
    assert named == {key: tuple(p.shape) for key, p in theirs.named_parameters() if p.requires_grad}
