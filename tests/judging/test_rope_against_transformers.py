"""RoPE frequencies and tables against those that transformers makes for the same config.json."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llorch.families.config import ModelConfig, YarnScaling
from llorch.families.read_huggingface import config_from_huggingface
from llorch.ops.rope import frequencies, rope_tables, scale_frequencies
from llorch.runtime.errors import FormatError

pytestmark = pytest.mark.live

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear-2": {"rope_type": "linear", "factor": 2.0},
    "linear-7.5": {"rope_type": "linear", "factor": 7.5},
    "llama3.1": LLAMA3 | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3.2": LLAMA3 | {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama4": LLAMA3 | {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    "llama3-wide-ramp": LLAMA3 | {"factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 64.0},
    "llama3-short": LLAMA3
    | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-1": YARN | {"factor": 1.0},
    "yarn-4": YARN | {"factor": 4.0},
    "yarn-40": YARN | {"factor": 40.0},
    "yarn-4-gain": YARN | {"factor": 4.0, "attention_factor": 0.75},
    "yarn-4-no-gain": YARN | {"factor": 4.0, "attention_factor": 1.0},
    "yarn-16-betas": YARN | {"factor": 16.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-4-of-the-context": {"rope_type": "yarn", "factor": 4.0},
    "yarn-4-short": YARN | {"factor": 4.0, "original_max_position_embeddings": 96},
}


def config_json(scaling: dict[str, Any], *, theta: float, head_dim: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": 100,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "rope_parameters": scaling | {"rope_theta": theta},
    }  # fmt: skip


@pytest.mark.nightly_cases(but=["llama3.1-500000.0-64"])
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 128), (500_000.0, 64), (1_000_000.0, 48)])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_gain_are_those_of_transformers(name, theta, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = config_json(SCALINGS[name], theta=theta, head_dim=head_dim)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    expected = np.asarray(theirs.inv_freq.tolist())
    config = config_from_huggingface(values, path="config.json")
    scaling = config.rope_scaling
    actual = scale_frequencies(frequencies(head_dim, theta), scaling, head_dim=head_dim, theta=theta)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # transformers computes in float32
    gain = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    assert gain == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers_near_and_far(name):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = config_json(SCALINGS[name], theta=500_000.0, head_dim=64)
    positions = np.array([0, 1, 7, 100, 4095, 16_000])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    expected = theirs(torch.zeros(1), torch.from_numpy(positions)[None])
    config = config_from_huggingface(values, path="config.json")
    actual = rope_tables(positions, head_dim=64, theta=config.rope_theta, scaling=config.rope_scaling)
    for ours, full in zip(actual, expected, strict=True):
        half = full[0, :, :32].numpy()
        # float32 angles of transformers: an error of the angle of up to 2 ulp, which grows with the position
        limit = 4 * np.finfo(np.float32).eps * (1 + positions[:, None])
        assert (np.abs(ours - half) <= limit).all()


def random_yarn(rng: np.random.Generator) -> tuple[dict[str, Any], float, int]:
    factor, context = float(rng.uniform(1, 64)), int(2 ** rng.uniform(4, 17))
    scaling = YARN | {"factor": factor, "original_max_position_embeddings": context}
    scaling |= {name: float(2 ** rng.uniform(-2, 7)) for name in ("beta_fast", "beta_slow") if rng.random() < 0.5}
    return scaling, float(1 + 10 ** rng.uniform(0, 7)), 2 * int(rng.integers(1, 129))


def config_unless_crossing(values: dict[str, Any]) -> ModelConfig | None:
    try:
        return config_from_huggingface(values, path="config.json")
    except FormatError as error:
        if "beta_fast=" in str(error):  # as of a ramp that ends before its start
            return None
        raise


def test_every_yarn_that_is_not_refused_has_the_frequencies_of_transformers(rng):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    refused = 0
    for _ in range(1000):
        scaling, theta, head_dim = random_yarn(rng)
        values = config_json(scaling, theta=theta, head_dim=head_dim)
        config = config_unless_crossing(values)
        if config is None:
            refused += 1
            continue
        theirs = SimpleNamespace(**values, standardize_rope_params=lambda: None)  # their config class is slow to make
        expected, gain = ROPE_INIT_FUNCTIONS["yarn"](theirs)
        assert isinstance(config.rope_scaling, YarnScaling)
        assert config.rope_scaling.attention_factor == pytest.approx(gain, rel=1e-12)
        actual = scale_frequencies(frequencies(head_dim, theta), config.rope_scaling, head_dim=head_dim, theta=theta)
        np.testing.assert_allclose(actual, np.asarray(expected.tolist()), rtol=1e-5, err_msg=str(values))
    assert 10 < refused < 500
