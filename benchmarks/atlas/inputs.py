"""Inputs of engines: random models of every family, without or with one special feature, and built-in models.

An engine may get a model wrong but the plain control input right: then the feature is the cause. A model may also be
wrong in one style of its configuration alone: then the style is the cause. Hugging Face wrote rope keys at the top of
`config.json` until transformers 4 ("old"), and writes them under `rope_parameters` since 5 ("new"). transformers 5
reads both.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from llorch.families.read_huggingface import config_from_huggingface
from llorch.files.convert import convert
from llorch.files.tensor_names import huggingface_tensors
from llorch.runtime.builtin import EVERY, builtin_path, goldens_folder

Keys = Mapping[str, Any]
Style = Literal["new", "old"]
FEW, MANY = 40, 600  # tokens
SEED, IDS = 7, (3, 250)  # ids exist in every model
QUANTISED_IDS = (3, 24)  # tokens of the quantised folders
_TOKENIZER = "micro-llama"  # tokenizer of all random models
_SCALING = "rope_parameters"  # key of features that change RoPE settings, not top-level keys


@dataclass(frozen=True)
class AtlasFamily:
    """Kind of model: its class in transformers, its own keys and those of RoPE, and its possible features."""

    model_type: str
    architecture: str
    keys: Keys
    features: tuple[str, ...] = ()
    rope: Keys = field(default_factory=dict)
    styles: tuple[Style, ...] = ("new", "old")


_PLAIN: Keys = {
    "hidden_size": 192, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 32,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "use_cache": True,
    "attention_dropout": 0.0, "initializer_range": 0.02,
}  # fmt: skip
_BY_STYLE: Mapping[str, Keys] = {
    "new": {"dtype": "float32", "transformers_version": "5.23.0"},
    "old": {"torch_dtype": "float32", "transformers_version": "4.57.6"},
}
_NO_BIAS: Keys = {"attention_bias": False}
NO_WINDOW: Keys = {
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "layer_types": ["full_attention"] * 2,
}  # fmt: skip
_ROPE: Keys = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS: Keys = {
    "moe_intermediate_size": 96, "num_experts": 7, "num_experts_per_tok": 3, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_SHARED: Keys = {"shared_expert_intermediate_size": 128}
_DELTA: Keys = _NO_BIAS | {
    "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_MROPE: Keys = {"partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5], "mrope_interleaved": True}

FAMILIES: Mapping[str, AtlasFamily] = {
    "llama": AtlasFamily(
        "llama", "LlamaForCausalLM", _NO_BIAS | {"mlp_bias": False, "pretraining_tp": 1},
        ("theta", "llama3", "linear", "yarn", "head_dim", "eps", "tied", "biases", "long", "split"),
    ),
    "qwen2": AtlasFamily(
        "qwen2", "Qwen2ForCausalLM", NO_WINDOW, ("theta", "yarn", "eps", "tied", "switched_window", "split"),
    ),
    "qwen3": AtlasFamily(
        "qwen3", "Qwen3ForCausalLM", NO_WINDOW | _NO_BIAS | {"head_dim": 64},
        ("theta", "yarn", "eps", "tied", "biases", "long", "split"),
    ),
    "mistral": AtlasFamily("mistral", "MistralForCausalLM", {"sliding_window": None}, ("theta", "window", "head_dim")),
    "smollm3": AtlasFamily(
        "smollm3", "SmolLM3ForCausalLM", NO_WINDOW | _NO_BIAS | {
            "mlp_bias": False, "num_hidden_layers": 4, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["full_attention"] * 4,
        }, ("theta",),
    ),
    "ministral3": AtlasFamily(
        "ministral3", "Ministral3ForCausalLM", {"head_dim": 64, "sliding_window": None}, (), {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }, ("new",),
    ),
    "qwen2_moe": AtlasFamily(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        NO_WINDOW | _EXPERTS | _SHARED | {"norm_topk_prob": False, "qkv_bias": True}, ("theta", "normalised"),
    ),
    "qwen3_moe": AtlasFamily(
        "qwen3_moe", "Qwen3MoeForCausalLM", _NO_BIAS | _EXPERTS | {
            "head_dim": 64, "norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None,
        }, ("theta", "unnormalised"),
    ),
    "qwen3_next": AtlasFamily(
        "qwen3_next", "Qwen3NextForCausalLM", _EXPERTS | _SHARED | _DELTA | {"norm_topk_prob": True},
        ("theta", "split"), {"partial_rotary_factor": 0.5},
    ),
    "qwen3_5": AtlasFamily("qwen3_5_text", "Qwen3_5ForCausalLM", _DELTA, ("theta", "split"), _MROPE, ("new",)),
    "qwen3_5_moe": AtlasFamily(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _EXPERTS | _SHARED | _DELTA, (), _MROPE, ("new",),
    ),
}  # fmt: skip
_YARN: Keys = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FEATURES: Mapping[str, Keys] = {
    "theta": {_SCALING: {"rope_theta": 500000.0}},
    "llama3": {_SCALING: {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}},
    "linear": {_SCALING: {"rope_type": "linear", "factor": 4.0}},
    "yarn": {_SCALING: _YARN},
    "head_dim": {"head_dim": 64},
    "eps": {"rms_norm_eps": 1e-2},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "window": {"sliding_window": 8},
    "switched_window": {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * 2},
    "normalised": {"norm_topk_prob": True},
    "unnormalised": {"norm_topk_prob": False},
    "long": {},
    "split": {},
}  # fmt: skip
QUANTISED = (  # one folder of each format, see `reference_outputs/quantised_folders`
    "gptq-4bit", "gptq-4bit-asym", "gptq-4bit-act-order", "awq-gemm", "fp8-block-partial", "fp8-tensor-static",
    "modelopt-nvfp4", "ct-w4a16", "ct-w4a16-asym", "ct-w3a16", "ct-w8a8", "ct-fp8-dynamic", "ct-fp8-block-wide",
    "ct-nvfp4", "ct-mxfp4", "ct-mxfp8", "ct-mixed", "bnb-nf4", "bnb-nf4-double", "bnb-int8", "mlx-4bit", "mlx-3bit",
    "mlx-4bit-experts", "mlx-mxfp4", "mlx-nvfp4",
)  # fmt: skip


@dataclass(frozen=True)
class AtlasInput:
    """Model and its token ids.

    Attributes:
        family: One of `FAMILIES`, a built-in model, or one of `QUANTISED`.
        feature: Special feature of the model, one of `FEATURES`; empty for a plain model.
        style: Style of its configuration.
        gguf: True for a GGUF file, False for a Hugging Face folder.
    """

    family: str
    feature: str = ""
    style: Style = "new"
    gguf: bool = False

    @property
    def name(self) -> str:
        """Name in tables and folders: `llama-theta-old`, `qwen3.gguf`."""
        old = "old" if self.style == "old" else ""
        return "-".join(filter(None, (self.family, self.feature, old))) + (".gguf" if self.gguf else "")

    @property
    def is_quantised(self) -> bool:
        """True if it is a quantised Hugging Face folder, or a GGUF file that llorch made of one."""
        return self.family in QUANTISED

    @property
    def parts(self) -> list[list[int]]:
        """Token ids, a list for each pass."""
        rng = np.random.default_rng(SEED)
        ids = [
            int(token_id)
            for token_id in rng.integers(
                *(QUANTISED_IDS if self.is_quantised else IDS), MANY if self.feature == "long" else FEW
            )
        ]
        return [ids[:23], ids[23:24], ids[24:]] if self.feature == "split" else [ids]

    @property
    def controls(self) -> "list[AtlasInput]":
        """Control inputs with one difference each: first the other style, then the model without the feature."""
        plain_inputs = [replace(self, feature="")] if self.feature else []
        is_styled = self.family in FAMILIES and not self.gguf and len(FAMILIES[self.family].styles) > 1
        restyled = [replace(self, style="old" if self.style == "new" else "new")] if is_styled else []
        return [*restyled, *plain_inputs]


def every_input() -> Iterator[AtlasInput]:
    """Yield every input once, in the order of the table."""
    for family, atlas_family in FAMILIES.items():
        for feature in ("", *atlas_family.features):
            yield from (AtlasInput(family, feature, style) for style in atlas_family.styles)
            yield AtlasInput(family, feature, gguf=True)
    for model in EVERY:
        yield AtlasInput(model)
        yield AtlasInput(model, gguf=True)


def quantised_inputs() -> Iterator[AtlasInput]:
    """Yield the quantised folders, and the GGUF files that llorch makes of them; nothing in an installed wheel."""
    for name in QUANTISED:
        if (_quantised_folder(name) / "config.json").is_file():
            yield AtlasInput(name)
            yield AtlasInput(name, gguf=True)


def _quantised_folder(name: str) -> Path:
    return goldens_folder() / "quantised_folders" / name


def write_input(atlas_input: AtlasInput, home: Path) -> Path:
    """Write the files of an input below a folder, unless they exist.

    Returns:
        The Hugging Face folder, or the GGUF file next to it.

    Raises:
        ValueError: A GGUF file cannot express the configuration.
    """
    folder = home / replace(atlas_input, gguf=False).name
    if not (folder / "config.json").exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        source = _source_path(atlas_input)
        _ = shutil.copytree(source, part) if source.is_dir() else convert(source, part)
        if atlas_input.family in FAMILIES:
            _write_random(atlas_input, part)
        part.rename(folder)
    if not atlas_input.gguf:
        return folder
    file = folder.with_name(f"{folder.name}.gguf")
    if not file.exists():
        convert(folder, file)
    return file


def _source_path(atlas_input: AtlasInput) -> Path:
    """Return the model to copy: the input itself, or the model whose tokenizer random models use."""
    if atlas_input.is_quantised:
        return _quantised_folder(atlas_input.family)
    return builtin_path(_TOKENIZER if atlas_input.family in FAMILIES else atlas_input.family)


def _write_random(atlas_input: AtlasInput, folder: Path) -> None:
    """Replace the copied model by random weights and a matching configuration; its tokenizer stays."""
    config = json_config(atlas_input) | {"vocab_size": json.loads((folder / "config.json").read_text())["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(random_tensors(config, folder), folder / "model.safetensors", metadata={"format": "pt"})


def json_config(atlas_input: AtlasInput) -> dict[str, Any]:
    """Return the contents of an input's `config.json`, without the size of the vocabulary."""
    family = FAMILIES[atlas_input.family]
    feature = dict(FEATURES.get(atlas_input.feature, {}))
    rope = {**_ROPE, **family.rope, **feature.pop(_SCALING, {})}
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    config = {**names, **_PLAIN, **family.keys, **_BY_STYLE[atlas_input.style], **feature}
    return config | ({"rope_parameters": rope} if atlas_input.style == "new" else _old_style(rope))


def _old_style(rope: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE settings under the keys of old config.json files; `rope` loses its theta and its rotated share."""
    top = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return top | {"rope_scaling": None if rope["rope_type"] == "default" else rope}


def random_tensors(config: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Draw random tensors by their names in a folder, in the order of the names: no norm gain is one, no bias zero."""
    rng, tensors = np.random.default_rng(0), {}
    shapes = {tensor.name: tensor.shape for tensor in huggingface_tensors(config_from_huggingface(config, path=folder))}
    for name in sorted(shapes):
        draw = rng.standard_normal(shapes[name]).astype(np.float32)
        if name.endswith("A_log"):
            tensors[name] = np.log(rng.uniform(0.01, 16, shapes[name])).astype(np.float32)
        elif name.endswith("dt_bias"):
            tensors[name] = draw - 4
        elif "norm" in name:
            tensors[name] = 1 + draw / 5
        else:
            tensors[name] = draw * np.float32(0.05)
    return tensors
