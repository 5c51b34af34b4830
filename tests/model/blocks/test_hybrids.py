"""The gated delta net and gated attention beside the modules of transformers, in float64; what their caches hold."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.families import HYBRIDS, random_folder
from helpers.refusals import refuses

from llorch.families.config import ModelConfig
from llorch.families.layers import DeltaNet, Layer
from llorch.files import Weights, open_weights
from llorch.model.blocks import forward
from llorch.model.blocks.delta_net import delta_net
from llorch.model.blocks.gated_attention import gated_attention
from llorch.model.cache import DeltaState, KVCache
from llorch.model.generate import IdsOnly
from llorch.model.model import Model
from llorch.ops.rope import rope_tables
from llorch.runtime.errors import NonFiniteRun

pytestmark = pytest.mark.live  # transformers makes the models
SEQ = 150
NET = DeltaNet(conv_kernel=4, n_key_heads=2, n_value_heads=6, key_head_dim=12, value_head_dim=10)
CONFIG = ModelConfig(
    family="qwen3", hidden_size=40, intermediate_size=56, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16,
    vocab_size=104, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_position_embeddings=512, qkv_bias=False,
    o_bias=False, qk_norm=True, tie_word_embeddings=False, layers=(Layer(mixer="delta_net"), Layer()), delta_net=NET,
    attention_gate=True, rotary_dim=4,
)  # fmt: skip
THEIRS = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 104, "rms_norm_eps": 1e-5, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"], "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip


@dataclass
class TransformersModules:
    """A module of each kind, what they make of the same input, and their weights as ours call them."""

    config: Any
    mixer: Any
    attention: Any
    rotary: Any

    @property
    def of_mixer(self) -> dict[str, np.ndarray]:
        it = self.mixer
        if hasattr(it, "in_proj_qkv"):
            inputs = [getattr(it, f"in_proj_{name}").weight for name in ("qkv", "z", "b", "a")]
        else:  # of Qwen3-Next the rows of each key head lie together
            import torch

            both = (getattr(it, name).weight.T[None] for name in ("in_proj_qkvz", "in_proj_ba"))
            q, k, v, z, b, a = (x.flatten(2)[0].T for x in it.fix_query_key_value_ordering(*both))
            inputs = [torch.cat([q, k, v]), z, b, a]
        others = (it.conv1d.weight[:, 0], it.dt_bias, -it.A_log.exp(), it.norm.weight, it.out_proj.weight)
        names = ("in_qkv", "in_z", "in_b", "in_a", "conv", "dt_bias", "decay", "delta_norm", "out_proj")
        return {name: x.detach().numpy() for name, x in zip(names, (*inputs, *others), strict=True)}

    @property
    def of_attention(self) -> dict[str, np.ndarray]:
        found = {f"{one}_proj": getattr(self.attention, f"{one}_proj").weight for one in "qkvo"}
        found |= {f"{one}_norm": 1 + getattr(self.attention, f"{one}_norm").weight for one in "qk"}
        return {name: x.detach().numpy() for name, x in found.items()}


@pytest.fixture(params=["Qwen3Next", "Qwen3_5"])
def hf_modules(request) -> TransformersModules:
    import torch
    import transformers

    from llorch.engines.transformers_capture import float64_everywhere

    name, torch_modules = request.param, transformers.models
    module = {
        "Qwen3Next": torch_modules.qwen3_next.modeling_qwen3_next,
        "Qwen3_5": torch_modules.qwen3_5.modeling_qwen3_5,
    }
    torch.manual_seed(0)
    with float64_everywhere(refuse=False), torch.no_grad():
        kind = "Qwen3NextConfig" if name == "Qwen3Next" else "Qwen3_5TextConfig"
        config = getattr(transformers, kind)(**THEIRS, attn_implementation="eager")
        made = [
            getattr(module[name], f"{name}{part}")(config, at) for at, part in enumerate(("GatedDeltaNet", "Attention"))
        ]
        for tensor in (x for one in made for x in one.parameters()):
            torch.nn.init.normal_(tensor, 0.3, 0.4) if tensor.ndim == 1 else torch.nn.init.normal_(tensor, 0, 0.4)
        made[0].A_log.copy_(torch.linspace(-4, 3, 6))
        made[0].dt_bias[-1] = 16.0  # a head that forgets at once: g is near -316
        rotary = getattr(module[name], f"{name}{'Text' if name == 'Qwen3_5' else ''}RotaryEmbedding")(config)
    return TransformersModules(config, made[0], made[1], rotary)


def parts(seq: int, cuts: list[int]) -> list[slice]:
    return [slice(*both) for both in pairwise([0, *cuts, seq])]


def state_array(of_theirs: Any) -> np.ndarray:
    assert of_theirs is not None
    return of_theirs.numpy()[0]


def run_delta_net(h: np.ndarray, w: Any, memory: DeltaState) -> np.ndarray:
    tables = rope_tables(np.arange(len(h)), head_dim=CONFIG.rotated, theta=1e4, scaling=None)
    return delta_net(h, w, CONFIG, *tables, memory, lambda name, x: x)


CUTS = [[], [1], [2], [3], [63], [64], [65], [128], [1, 2, 3, 4], [70, 71, 140], list(range(1, SEQ))]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: "-".join(map(str, cuts[:4])) or "whole")
def test_a_delta_net_is_that_of_transformers_however_it_is_cut(hf_modules, cuts):
    import torch
    import transformers

    from llorch.engines.transformers_capture import float64_everywhere

    h, memory = np.random.default_rng(1).normal(size=(SEQ, 40)) * 2, DeltaState.empty(NET, np.float64)
    cache = transformers.DynamicCache(config=hf_modules.config)
    with float64_everywhere(), torch.no_grad():
        expected = hf_modules.mixer(torch.tensor(h[None]), cache_params=cache)[0].numpy()
    actual = [run_delta_net(h[part], hf_modules.of_mixer, memory) for part in parts(SEQ, cuts)]
    for ours, of_theirs in (
        (np.concatenate(actual), expected),
        (memory.conv, state_array(cache.get_conv_state(0)).T[-3:]),
        (memory.delta, state_array(cache.get_recurrent_state(0))),
    ):
        np.testing.assert_allclose(ours, of_theirs, rtol=0, atol=1e-12 * np.abs(of_theirs).max())


@pytest.mark.parametrize("seq", [1, 2, 3, 70])
def test_short_passes_leave_the_states_of_transformers(hf_modules, seq):
    import torch
    import transformers

    from llorch.engines.transformers_capture import float64_everywhere

    h, memory = np.random.default_rng(1).normal(size=(seq, 40)), DeltaState.empty(NET, np.float64)
    cache = transformers.DynamicCache(config=hf_modules.config)
    with float64_everywhere(), torch.no_grad():
        hf_modules.mixer(torch.tensor(h[None]), cache_params=cache)
    run_delta_net(h, hf_modules.of_mixer, memory)
    np.testing.assert_allclose(memory.conv, state_array(cache.get_conv_state(0)).T[-3:], atol=1e-13)
    np.testing.assert_allclose(memory.delta, state_array(cache.get_recurrent_state(0)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS[:-1], ids=str)
def test_gated_attention_is_that_of_transformers(hf_modules, cuts):
    import torch

    from llorch.engines.transformers_capture import float64_everywhere

    h, first = np.random.default_rng(2).normal(size=(SEQ, 40)), 7
    positions = np.arange(first, first + SEQ)
    with float64_everywhere(), torch.no_grad():
        x, at = torch.tensor(h[None]), torch.tensor(positions[None])
        mask = torch.full((SEQ, SEQ), -torch.inf).triu(1)[None, None]
        expected = hf_modules.attention(x, hf_modules.rotary(x, at), mask)[0][0].numpy()
    cache, actual = KVCache(CONFIG, np.float64), list[np.ndarray]()
    for part in parts(SEQ, cuts):
        tables = rope_tables(positions[part], head_dim=CONFIG.rotated, theta=1e4, scaling=None)
        actual.append(
            gated_attention(h[part], hf_modules.of_attention, CONFIG, *tables, cache.memory(1), lambda _, x: x)
        )
        cache.advance(len(h[part]))
    np.testing.assert_allclose(np.concatenate(actual), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


LENGTHS = (70, 1, 200, 2, 3, 4, 63, 64, 65, 129)  # of the text of a seed


def ids_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 104, n)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] if i > 2 else []) for i in range(10)])
def test_logits_are_those_of_transformers_in_float64(tmp_path: Path, family: str, seed: int):
    import torch
    import transformers

    from llorch.engines.transformers_capture import float64_everywhere

    folder, ids = random_folder(family, tmp_path / family, seed), ids_of(seed, LENGTHS[seed])
    with float64_everywhere(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        expected = model(torch.tensor(ids[None]), use_cache=False).logits[0].numpy()
    weights = open_weights(folder).astype(np.float64)
    actual = forward(ids, weights, KVCache(weights.config, np.float64))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:

    return open_weights(random_folder("qwen3_5", tmp_path_factory.mktemp("hybrid") / "m", 3)).astype(np.float64)


@pytest.mark.parametrize("cuts", [[1], [2], [3], [63], [64, 65], [7, 71, 135], list(range(1, 140))], ids=str)
def test_a_text_in_parts_is_that_text(weights: Weights, cuts: list[int]):
    ids = ids_of(1, 140)
    whole, cache = forward(ids, weights, KVCache(weights.config, np.float64)), KVCache(weights.config, np.float64)
    parts = np.concatenate([forward(part, weights, cache) for part in np.split(ids, cuts)])
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_a_prompt_longer_than_a_pass_is_cut_by_the_model(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.model.model.PREFILL_CHUNK", 50)
    ids, model = ids_of(2, 170), Model(weights)
    whole = forward(ids, weights, KVCache(weights.config, np.float64))
    np.testing.assert_allclose(model.forward(ids), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("failing", ["embed", "l0.delta_state", "l2.gated_norm", "l3.k_cache", "logits"])
def test_failed_pass_does_not_change_the_cache(weights: Weights, failing: str):
    ids, cache = ids_of(4, 90), KVCache(weights.config, np.float64)
    expected = forward(ids, weights, KVCache(weights.config, np.float64))[60:]
    forward(ids[:60], weights, cache)

    def keep(name: str, array: np.ndarray) -> np.ndarray:
        if name == failing:
            raise KeyboardInterrupt
        return array

    with pytest.raises(KeyboardInterrupt):
        forward(ids[60:], weights, cache, keep=keep)
    np.testing.assert_allclose(forward(ids[60:], weights, cache), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("weight", "stage"), [("decay", "log_decay"), ("conv", "conv_out"), ("delta_norm", "gated_norm")]
)
def test_what_is_not_finite_is_named_where_it_begins(weights: Weights, weight: str, stage: str):
    class Broken(Weights):
        def __init__(self) -> None:
            vars(self).update(vars(weights))

        def __getitem__(self, name: str) -> Any:
            return weights[name] * (np.nan if name == f"layers.1.{weight}" else 1)

    model = Model(Broken())
    vars(model)["tokenizer"] = IdsOnly()
    with refuses(NonFiniteRun, f"l1.{stage}"):
        list(model.generate(ids_of(0, 70).tolist(), max_tokens=2, ignore_eos=True))
