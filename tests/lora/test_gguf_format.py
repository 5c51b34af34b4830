"""LoRA GGUF files: llama.cpp computes from them what we compute, and what it could not is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders.random_adapters import EVERY, IDS, adapted_logits, plain_logits, random_adapter, same_tensors, tiny_base
from gguf import GGUFWriter
from helpers.refusals import refuses

from llorch.families.config import ModelConfig
from llorch.files import open_gguf, open_weights
from llorch.files.export import write_gguf
from llorch.lora import gguf_format
from llorch.lora.base import identity_of
from llorch.lora.files import read_adapter, recorded_base
from llorch.lora.gguf_format import common_alpha, write_lora_gguf
from llorch.runtime.errors import FormatError

KINDS = {
    "every matrix": {"target_modules": EVERY},
    "rsLoRA": {"target_modules": EVERY, "use_rslora": True},
    "rsLoRA with ranks": {"target_modules": EVERY, "use_rslora": True, "rank_pattern": {"q_proj": 5}},
    "alpha and rank patterns": {
        "target_modules": EVERY,
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"up_proj": 9.0, r"layers\.1\..*q_proj": 1.5},
    },
    "embedding and output": {"target_modules": ("embed_tokens", "lm_head", "v_proj")},
    "one layer": {"target_modules": ("q_proj", "k_proj"), "layers_to_transform": (1,)},
}
CASES = [("llama", kind) for kind in KINDS] + [("qwen2", "every matrix"), ("qwen3", "rsLoRA with ranks")]


@pytest.mark.live
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_llamacpp_computes_the_logits_of_llorch(tmp_path, family, kind):
    from llorch.engines.llamacpp import logits_with_adapter

    base = tiny_base(tmp_path / "base", family)
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **KINDS[kind])
    write_lora_gguf(adapter, tmp_path / "adapter.gguf", weights.config, base=identity_of(weights))
    write_gguf(weights, tmp_path / "base.gguf")
    ours = adapted_logits(base, adapter)
    theirs = logits_with_adapter(tmp_path / "base.gguf", tmp_path / "adapter.gguf", IDS)
    assert np.abs(ours - plain_logits(base)).max() > 0.01  # the adapter does something
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=5e-6 * np.abs(ours).max())


@pytest.mark.live
def test_llamacpp_aborts_on_an_embedding_adapter_of_a_tied_base(tmp_path, monkeypatch):
    import subprocess
    import sys

    monkeypatch.setattr(gguf_format, "_refuse", lambda *_: None)
    weights = open_weights(tiny_base(tmp_path / "base", tied=True))
    adapter = random_adapter(weights.config, target_modules=("embed_tokens",))
    write_lora_gguf(adapter, tmp_path / "adapter.gguf", weights.config)
    script = "import sys; from llorch.engines.llamacpp import logits_with_adapter as f; f(*sys.argv[1:3], [1, 2])"
    command = [sys.executable, "-c", script, str(tmp_path / "base"), str(tmp_path / "adapter.gguf")]
    ended = subprocess.run(command, capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert ended.returncode < 0  # a signal: no error message can be given any more


@pytest.mark.parametrize(
    ("settings", "tied", "text"),
    [
        ({"use_dora": True}, False, "DoRA"),
        ({"target_modules": ("lm_head",)}, True, "lm_head:"),
        ({"target_modules": ("embed_tokens", "q_proj")}, True, "embed_tokens:"),
    ],
    ids=["DoRA", "output", "embedding"],
)
def test_adapter_unsupported_by_llamacpp_is_refused_without_writing(tmp_path, settings, tied, text):
    config = open_weights(tiny_base(tmp_path / "base", tied=tied)).config
    facts = (text, "tied") if tied else (text, "llama.cpp")
    with refuses("Unsupported", *facts, "llorch lora merge", where=tmp_path / "adapter.gguf"):
        write_lora_gguf(random_adapter(config, **settings), tmp_path / "adapter.gguf", config)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_gguf_adapter_round_trip_keeps_the_deltas(tmp_path, family, kind):
    base = tiny_base(tmp_path / "base", family)
    weights = open_weights(base)
    adapter = random_adapter(weights.config, **KINDS[kind])
    write_lora_gguf(adapter, tmp_path / "adapter.gguf", weights.config, base=identity_of(weights))
    actual = read_adapter(tmp_path / "adapter.gguf", weights.config)
    expected = adapted_logits(base, adapter)
    np.testing.assert_allclose(adapted_logits(base, actual), expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    if common_alpha(adapter) is not None:
        assert same_tensors(actual, adapter)
    assert recorded_base(tmp_path / "adapter.gguf") == identity_of(weights)


def test_alpha_is_shared_if_possible_else_scales_are_folded():
    def alpha_of(**settings) -> float | None:
        return common_alpha(random_adapter(config(), **settings))

    assert alpha_of(r=4, lora_alpha=6.0) == 6.0
    assert alpha_of(r=4, lora_alpha=6.0, use_rslora=True) == 12.0  # alpha * sqrt(r)
    assert alpha_of(r=4, lora_alpha=6.0, rank_pattern={"q_proj": 2}) == 6.0  # each scale is alpha / its own rank
    assert alpha_of(r=4, lora_alpha=6.0, rank_pattern={"q_proj": 9}, use_rslora=True) is None
    assert alpha_of(r=4, lora_alpha=6.0, alpha_pattern={"q_proj": 2.0}) is None


def test_equal_adapters_give_equal_bytes(tmp_path):
    for name in ("one", "other"):
        write_lora_gguf(random_adapter(config()), tmp_path / name, config())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(
    ("change", "code", "expected_name"),
    [
        ({"general.type": "model"}, "Unsupported", "general.type"),
        ({"adapter.type": "ia3"}, "Unsupported", "adapter.type"),
        ({"arch": "qwen2"}, "BaseMismatch", "general.architecture"),
        ({"adapter.lora.alpha": float("nan")}, "OutOfRange", "alpha"),
        ({"adapter.lora.alpha": -1.0}, "OutOfRange", "lora_alpha"),
        ({"blk.0.attn_q.weight.lora_a": None}, "Missing", "blk.0.attn_q"),
        ({"blk.0.attn_q.weight.lora_b": None}, "Missing", "blk.0.attn_q"),
        ({"blk.0.attn_q.weight.lora_a": (32, 3)}, "Shape", "layers.0.q_proj.lora_A"),
        ({"blk.0.attn_q.weight.lora_b": (31, 3)}, "Shape", "layers.0.q_proj.lora_B"),
        ({"blk.0.attn_q.weight.lora_b": (32,)}, "Shape", "blk.0.attn_q"),
        ({"token_embd.weight.lora_a": (3, 40)}, "Shape", "embed_tokens.lora_A"),
        ({"blk.7.attn_q.weight.lora_a": (3, 32), "blk.7.attn_q.weight.lora_b": (32, 3)}, "Unexpected", "blk.7"),
        ({"blk.0.attn_q.weight.magnitude": (32,)}, "Unexpected", "magnitude"),
        ({"blk.0.attn_norm.weight": (32,)}, "Unsupported", "attn_norm"),
        ({"NaN": "blk.0.attn_q.weight.lora_a"}, "NonFinite", "layers.0.q_proj.lora_A"),
    ],
)
def test_invalid_files_are_refused_by_name(tmp_path, change, code, expected_name):
    path = write_changed(tmp_path, change)
    with pytest.raises(FormatError) as caught:
        read_adapter(path, config())
    assert caught.value.code == code
    assert expected_name in str(caught.value)
    assert str(path) in str(caught.value)


def test_unchanged_copy_is_read(tmp_path):
    actual = read_adapter(write_changed(tmp_path, {}), config())
    assert same_tensors(actual, random_adapter(config(), target_modules=("q_proj", "embed_tokens")))
    assert actual.config.lora_alpha == 5.0


def test_truncated_file_is_refused(tmp_path):
    path = write_changed(tmp_path, {})
    path.write_bytes(path.read_bytes()[:-40])
    with refuses("Truncated", path.stat().st_size, where=path):
        read_adapter(path, config())


def config() -> ModelConfig:
    from builders.tiny_models import HEAD_DIM, HEADS, HIDDEN, INTER, KV_HEADS, VOCAB

    return ModelConfig(
        family="llama", hidden_size=HIDDEN, intermediate_size=INTER, n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, vocab_size=VOCAB, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        max_position_embeddings=64, qkv_bias=False, o_bias=False, qk_norm=False, tie_word_embeddings=False,
    )  # fmt: skip


def write_changed(folder: Path, change: dict) -> Path:
    """A sound adapter file, written anew with other values, tensors of other shapes, or without some."""
    sound = folder / "sound.gguf"
    write_lora_gguf(random_adapter(config(), target_modules=("q_proj", "embed_tokens")), sound, config())
    with open_gguf(sound) as file:
        tensors = {name: np.array(file.array(name)) for name in file.tensors}
    values: dict[str, object] = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 5.0}
    values |= {key: value for key, value in change.items() if key in values}
    for name, shape in change.items():
        if ".weight" in name:
            tensors.pop(name, None)
            tensors |= {} if shape is None else {name: np.ones(shape, np.float32)}
    if "NaN" in change:
        tensors[change["NaN"]][0, 0] = np.nan
    return _written(folder / "changed.gguf", change.get("arch", "llama"), values, tensors)


def _written(path: Path, arch: str, values: dict, tensors: dict) -> Path:
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        add: Callable = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
