"""Compare the hyperparameters of a file with those of the source from which the file was made.

Hyperparameters are compared by meaning. Two values that give equal numbers are equal, whatever their formats write. A
value that changes no number gives a note. `tie_word_embeddings` is left out, because the tensors decide about it.

Source: transformers `configuration_*.py` for keys, llama.cpp `conversion/llama.py` for `rope_freqs.weight`.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from llorch.families.config import FactorScaling, ModelConfig, RopeScaling, YarnScaling
from llorch.families.table import FAMILIES
from llorch.judging.compare import compare_exact
from llorch.judging.types import Comparison
from llorch.ops.rope import frequencies, scale_frequencies
from llorch.stages.stage_ref import StageRef

_FLOAT32_ERROR = 2 * 2.0**-23  # relative; GGUF files store the base, factors and other settings in float32
# llama.cpp's converter computes rope_freqs.weight in float32. The subtraction in the ramp makes the error larger: up to
# 3 ulp for Llama 3.2 (factor 32, head_dim 128), 11 ulp for factor 64.
_FACTOR_ERROR = 16 * 2.0**-23
_MOST_PADDING = 1024  # rows of embed_tokens after the last token; trainers round the number of rows up to a multiple
_OTHER_TRAITS = {"qkv_bias", "o_bias", "rope", "head_norm", "tempered"}  # traits of layers that other keys compare
_SIZES = {  # key of config.json -> attribute of ModelConfig that the shapes of tensors depend on
    "num_hidden_layers": "n_layers", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim",
    "num_experts": "experts.n_experts", "moe_intermediate_size": "experts.expert_size",
    "shared_expert_intermediate_size": "experts.shared_size", "linear_conv_kernel_dim": "delta_net.conv_kernel",
    "linear_num_key_heads": "delta_net.n_key_heads", "linear_key_head_dim": "delta_net.key_head_dim",
    "linear_num_value_heads": "delta_net.n_value_heads", "linear_value_head_dim": "delta_net.value_head_dim",
}  # fmt: skip
_NUMBERS = {  # key of config.json -> other attribute of ModelConfig, and the effect of another value
    "rms_norm_eps": ("rms_norm_eps", "every RMSNorm divides by another number"),
    "attention_bias": ("qkv_bias", "queries, keys and values have a bias in the file or in the source only"),
    "attention_out_bias": ("o_bias", "attention outputs have a bias in the file or in the source only"),
    "num_experts_per_tok": ("experts.n_experts_per_token", "another number of experts runs for each token"),
    "norm_topk_prob": ("experts.norm_topk_prob", "outputs of experts are multiplied by other weights"),
}
_IN_LAYERS = {  # key of config.json -> effect of another value in layers
    "layer_types": "the layers compute another function",
    "no_rope_layers": "the layers rotate queries and keys by another rule",
    "use_qk_norm": "the layers normalise query and key heads in the file or in the source only",
    "attn_temperature_tuning": "the layers multiply queries by another number",
    "sliding_window": "tokens beyond the shorter window attend to other tokens",
    "attention_chunk_size": "tokens beyond the shorter chunk attend to other tokens",
}
_Row = tuple[str, float, str]  # key, share of wrong numbers, note about a difference


def compare_settings(actual: ModelConfig, expected: ModelConfig, *, model: str) -> Iterator[Comparison]:
    """Compare the hyperparameters of a file (`actual`) with the source's (`expected`), one comparison for each key.

    The note of a difference has both values and the effect. PASS with a note: the difference changes no number.
    """
    for key, wrong, note in _compare(actual, expected):
        yield compare_exact(StageRef("00", "settings", part=key), "source", wrong, note, model=model, backend="file")


def incompatible(actual: ModelConfig, expected: ModelConfig) -> str | None:
    """Explain why a file and its source cannot be two forms of one model: the first three reasons; else return None.

    Reasons are other numbers of layers, heads, experts or tokens, other widths, and layers of another kind.
    """
    keys = {*_SIZES, "layer_types", "vocab_size"}
    notes = [note for key, wrong, note in _compare(actual, expected) if wrong and key in keys]
    return f"the file and its source cannot be two forms of one model: {'; '.join(notes[:3])}" if notes else None


def _compare(actual: ModelConfig, expected: ModelConfig) -> Iterator[_Row]:
    sizes = {key: (name, "tensors differ in number or shape") for key, name in _SIZES.items()}
    for key, (name, effect) in (sizes | _NUMBERS).items():
        values = [_read(config, name) for config in (actual, expected)]
        if values != [None, None]:
            yield _row(key, values, effect)
    yield from _compare_names(actual, expected)
    yield from _compare_rope(actual, expected)
    yield from _compare_layers(actual, expected)


def _row(key: str, values: Sequence[object], effect: str, wrong: float = 1.0) -> _Row:
    """Compare the values of file and source; `wrong` is the share of wrong numbers if the values differ."""
    if values[0] == values[1]:
        return key, 0.0, ""
    actual, expected = (_format(value) for value in values)
    return key, wrong, f"{key}: {actual} in the file, {expected} in the source: {effect}"


def _format(value: object) -> str:
    return "none" if value is None else "rope_freqs.weight" if isinstance(value, FactorScaling) else str(value)


def _read(config: ModelConfig, name: str) -> object:
    """Return a hyperparameter, floats rounded to float32; None if the model does not use the setting."""
    owner, _, attribute = name.rpartition(".")
    record = getattr(config, owner) if owner else config
    has_only_experts = config.layers and all(layer.experts for layer in config.layers)
    if record is None or (has_only_experts and name == "intermediate_size"):
        return None
    value = getattr(record, attribute)
    return _as_float32(value) if isinstance(value, float) else value


def _as_float32(value: float) -> float:
    """Return the shortest number with the same float32 value, because GGUF files store float32."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _compare_names(actual: ModelConfig, expected: ModelConfig) -> Iterator[_Row]:
    """Compare the architecture, the context length and the number of rows, which two forms of one model may change."""
    names = [FAMILIES[config.family].gguf for config in (actual, expected)]
    yield _row("model_type", names, "the name changes no number", 0.0)
    contexts = [config.max_position_embeddings for config in (actual, expected)]
    effect = f"longer texts are {'allowed' if contexts[0] > contexts[1] else 'refused'}"
    yield _row("max_position_embeddings", contexts, effect, 0.0)
    sizes = [config.vocab_size for config in (actual, expected)]
    is_padding = abs(sizes[0] - sizes[1]) <= _MOST_PADDING
    effect = "the rows may be padding" if is_padding else "tokens have no row, or rows have no token"
    yield _row("vocab_size", sizes, effect, float(not is_padding))


def _compare_rope(actual: ModelConfig, expected: ModelConfig) -> Iterator[_Row]:
    """Compare the frequencies of base, rotated part and scaling together, then each alone to name the wrong setting."""
    shares = [config.rotated / config.head_dim for config in (actual, expected)]
    yield _row("partial_rotary_factor", shares, "another part of each head is rotated")
    if actual.rotated != expected.rotated:
        return  # the numbers of frequencies differ
    scalings = [config.rope_scaling for config in (actual, expected)]
    has_factors = any(isinstance(scaling, FactorScaling) for scaling in scalings)
    differ = partial(_differ, error=_FACTOR_ERROR if has_factors else _FLOAT32_ERROR)
    is_wrong = differ(*(_frequencies(config, config.rope_scaling) for config in (actual, expected))).any()
    wrong_bases = is_wrong & differ(*(_frequencies(config, None) for config in (actual, expected)))
    effect = "every position is rotated by another angle" if wrong_bases.any() else "the frequencies are equal"
    thetas = [_as_float32(config.rope_theta) for config in (actual, expected)]
    yield _row("rope_theta", thetas, effect, float(wrong_bases.mean()))
    # With the base of the source for both scalings, a wrong base gives no second finding.
    scaled = [_frequencies(expected, scaling) for scaling in scalings]
    wrong_pairs = is_wrong & differ(*scaled)
    gains = [scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0 for scaling in scalings]
    wrong_gain = differ(*gains)
    effects = ["cos and sin are multiplied by {:.6g}, not {:.6g}".format(*gains)] if wrong_gain else []
    if wrong_pairs.any():
        first, count = wrong_pairs.argmax(), f"{wrong_pairs.sum()} of {len(wrong_pairs)}"
        angles = "pair {}: {:.6g}, not {:.6g} radians per position".format(first, *(pairs[first] for pairs in scaled))
        effects.append(f"{count} pairs of each head are rotated by other angles ({angles})")
    wrong = float(max(wrong_pairs.mean(), wrong_gain))
    yield _row("rope_scaling", scalings if effects else [None, None], " and ".join(effects), wrong)


def _frequencies(config: ModelConfig, scaling: RopeScaling | None) -> np.ndarray:
    """Compute the radians per position of each pair of a head, shape (pairs,), in float64."""
    bases = frequencies(config.rotated, config.rope_theta)
    return scale_frequencies(bases, scaling, head_dim=config.rotated, theta=config.rope_theta)


def _differ(actual: np.ndarray | float, expected: np.ndarray | float, *, error: float) -> np.ndarray:
    return ~np.isclose(actual, expected, rtol=error, atol=0)


def _compare_layers(actual: ModelConfig, expected: ModelConfig) -> Iterator[_Row]:
    """Compare the settings of each layer, for positions below both context lengths."""
    n_positions = min(actual.max_position_embeddings, expected.max_position_embeddings)
    layers = range(min(actual.n_layers, expected.n_layers))
    settings = [[_layer_settings(config, layer, n_positions) for config in (actual, expected)] for layer in layers]
    for key, effect in _IN_LAYERS.items():
        pairs = [(in_file.get(key), in_source.get(key)) for in_file, in_source in settings]
        wrong = {pair: [layer for layer in layers if pairs[layer] == pair] for pair in pairs if pair[0] != pair[1]}
        notes = [f"{_row(key, pair, effect)[2]} (layers: {', '.join(map(str, wrong[pair]))})" for pair in wrong]
        if {*pairs} != {(None, None)}:
            yield key, sum(map(len, wrong.values())) / len(pairs), "; ".join(notes)


def _layer_settings(config: ModelConfig, index: int, n_positions: int) -> dict[str, object]:
    """Return the settings of a layer, without those that change no number below `n_positions`."""
    layer, temperature = config.layer(index), config.temperature
    settings: dict[str, object] = {"layer_types": " ".join(sorted(config.traits(index) - _OTHER_TRAITS))}
    if layer.mixer != "attention":
        return settings
    if layer.rope:
        settings["no_rope_layers"] = "pairs (2j, 2j + 1)" if config.interleaved_rope_hf else "pairs (j, j + half)"
    if layer.head_norm:
        settings["use_qk_norm"] = True
    if layer.has_attention_temperature and temperature and temperature.floor - temperature.offset < n_positions:
        factor = f"floor((position + {temperature.offset}) / {temperature.floor})"
        settings["attn_temperature_tuning"] = f"1 + {_as_float32(temperature.scale)} * ln(1 + {factor})"
    bounds = {"sliding_window": layer.window, "attention_chunk_size": layer.chunk}
    return settings | {key: bound for key, bound in bounds.items() if bound is not None and bound < n_positions}
