"""All hypotheses that a diagnosis replays: possible deviations of the engine from the right computation.

There are three kinds. *Mistakes* come from the library `diagnosis/mistakes`. *Settings* have a value that is recovered
from the error: an eps, a RoPE base, a scale, a position offset, the source layer of weights. *Roundings* are
arithmetic: the cache, the inputs of products or the weights in a narrower dtype.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llorch.diagnosis.attempt import Hypothesis, SettingFamily
from llorch.diagnosis.expected import HALF
from llorch.diagnosis.mistakes import STAGE_MISTAKES, Mistake
from llorch.diagnosis.mistakes.attention import hidden_in, with_mask
from llorch.diagnosis.mistakes.norm import NORM, NORMS
from llorch.diagnosis.mistakes.rope import ROTATED
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.diagnosis.replay import Change, LayerSetting, StageChange, StageKeys
from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig
from llorch.families.layers import Layer
from llorch.ops.numerics import QuantMethod
from llorch.ops.rope import frequencies, llama3_factors, rope
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind, round_activations
from llorch.stages.table import BY_NAME, DENSE_PRODUCTS, STAGES, rope_input

ATTENDED = ("q_rope", "k_cache", "attn_probs", "v_cache")  # inputs of the two products of attention
PRODUCTS = (*(stage.name for stage in STAGES if stage.matrix), "attn_scores", "attn_context")
PROJECTED = tuple(dict.fromkeys(stage.dense_input for stage in DENSE_PRODUCTS))  # inputs of products with a matrix
WEIGHTED = tuple(stage.name for stage in STAGES if stage.matrix or stage.name in (*NORMS, "embed"))
CAPPED = ("attn_scores", "logits")  # stages to which models with a soft cap apply it
SCALED = tuple(stage.name for stage in STAGES if stage.name not in ("attn_scores", "attn_probs", "topk_ids"))
_NO_EPS = 1e-300  # a configuration must have a positive eps


def known_mistakes(config: ModelConfig) -> Iterator[Hypothesis]:
    """Yield the known mistakes that apply to a configuration."""
    for mistake in STAGE_MISTAKES:
        if mistake.applies_to(config) and any(BY_NAME[stage].applies_to(config) for stage in mistake.stages):
            yield Hypothesis(
                mistake.name, "mistake", mistake.stages, mistake.diagnosis, partial(_change_by_mistake, mistake),
                after_cached=mistake.after_cached, rounds=mistake.rounds, in_layers=partial(mistake.in_layers, config),
            )  # fmt: skip


def _change_by_mistake(mistake: Mistake[StageInputs], stage_keys: StageKeys) -> Change:
    """Make the change that injects a mistake at some stages."""

    def wrong(inputs: StageInputs, stage: str, array: np.ndarray) -> np.ndarray:
        if mistake.after_cached and not inputs.has_past:
            return array
        try:
            return mistake.result(inputs, stage)
        except (AttributeError, IndexError, TypeError):  # the mistake needs an array, but the matrix is quantised
            decoded = _rounded_weights(inputs.weights, lambda weight: weight)
            return mistake.result(replace(inputs, weights=decoded), stage)

    return Change(dict.fromkeys(stage_keys, StageChange(wrong, mistake.reads)))


def _change_stage(wrong: Callable[[np.ndarray], np.ndarray]) -> Callable[[StageKeys], Change]:
    """Make a change that replaces stages by a function of llorch's array."""
    return lambda stage_keys: Change(dict.fromkeys(stage_keys, StageChange(lambda inputs, stage, array: wrong(array))))


def _change_setting(change: Callable[[LayerSetting], LayerSetting]) -> Callable[[StageKeys], Change]:
    """Make a change of settings; it acts only on stages that the dump lacks."""
    return lambda stage_keys: Change(setting=change)


def _change_config(**fields: Any) -> Callable[[StageKeys], Change]:
    return _change_setting(lambda setting: replace(setting, config=replace(setting.config, **fields)))


def _format(value: float) -> str:
    return f"{value:.6g}"


def _eps(config: ModelConfig, value: float) -> Hypothesis:
    """Make the hypothesis of another eps in all norms; for 0, with name and sentence of the mistake without eps."""
    missing = next(mistake for mistake in NORM if mistake.name == "norm-eps-missing")
    message = f"eps is {_format(value)} here; this model's config says {_format(config.rms_norm_eps)}."
    name, sentence, number = ("norm-eps", message, _format(value)) if value else (missing.name, missing.diagnosis, "")
    return Hypothesis(
        name, "setting", tuple(NORMS), sentence, _change_config(rms_norm_eps=value or _NO_EPS), number, by_place=False
    )


# As in Llama 3.1; `_as_llama3` replaces the factor and the original context length.
_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def _as_llama3(config: ModelConfig) -> Llama3Scaling | None:
    """Derive the Llama 3 scaling from the factors of a GGUF file; None if no scaling has these factors.

    A hypothesis with another rope base needs the scaling, because the factors depend on the base.
    """
    if not isinstance(config.rope_scaling, FactorScaling):
        return config.rope_scaling if isinstance(config.rope_scaling, Llama3Scaling) else None
    factors, inv_freq = np.asarray(config.rope_scaling.factors), frequencies(config.head_dim, config.rope_theta)
    for exponent in range(5, 20):  # original context lengths, 32 to 524288
        scaling = replace(_LLAMA3, factor=float(factors.max()), original_max_position_embeddings=2**exponent)
        if np.allclose(llama3_factors(inv_freq, scaling), factors, rtol=1e-4):
            return scaling
    return None


def _theta(config: ModelConfig, value: float) -> Hypothesis:
    return Hypothesis(
        "rope-theta", "setting", ROTATED,
        f"The base of RoPE is {_format(value)} here; this model's config says {_format(config.rope_theta)}.",
        _change_config(rope_theta=value, rope_scaling=_as_llama3(config) or config.rope_scaling), _format(value),
        by_place=False,
    )  # fmt: skip


def _unscaled(config: ModelConfig, value: float) -> Hypothesis:
    """Make the hypothesis that the model's scaling of RoPE is missing; `value` is unused."""
    return Hypothesis(
        "rope-scaling-missing", "setting", ROTATED, "The frequencies were not scaled, as the config says.",
        _change_config(rope_scaling=None), by_place=False,
    )  # fmt: skip


def _linear_scaling(config: ModelConfig, value: float) -> Hypothesis:
    """Make the hypothesis that positions are divided by a factor, as by linear scaling of RoPE."""
    if config.rope_scaling is None:
        change = _change_config(rope_scaling=LinearScaling(factor=value))
    else:
        change = _change_setting(lambda setting: replace(setting, positions=setting.positions / value))
    n_times = 1 / value
    is_repeated = n_times > 1 and n_times == round(n_times)
    reason = f"the rotation is applied {n_times:g} times, or scaled" if is_repeated else "linear scaling"
    return Hypothesis(
        "rope-position-factor", "setting", ROTATED,
        f"Positions are divided by {_format(value)} here ({reason}); this model's config says otherwise.",
        change, _format(value), by_place=False,
    )  # fmt: skip


def _llama3_factor(config: ModelConfig, value: float) -> Hypothesis:
    scaling = replace(_as_llama3(config) or _LLAMA3, factor=value)
    return Hypothesis(
        "rope-llama3-factor", "setting", ROTATED,
        f"llama3 scaling has the factor {_format(value)} here; this model's config has another.",
        _change_config(rope_scaling=scaling), _format(value), by_place=False,
    )  # fmt: skip


def _offset(config: ModelConfig, value: float, *, later_passes_only: bool = False) -> Hypothesis:
    """Make the hypothesis that positions are shifted by a number."""
    n = int(value)

    def change(setting: LayerSetting) -> LayerSetting:
        is_skipped = later_passes_only and not setting.n_cached
        return setting if is_skipped else replace(setting, positions=setting.positions + n)

    condition = " after cached tokens" if later_passes_only else ""
    return Hypothesis(
        "rope-position-offset", "setting", ROTATED,
        f"Positions{condition} are {abs(n)} too {'high' if n > 0 else 'low'} here; the first token of a text is at 0.",
        _change_setting(change), str(n), after_cached=later_passes_only, by_place=False,
    )  # fmt: skip


def _rotated_share(config: ModelConfig, value: float) -> Hypothesis:
    def wrong(inputs: StageInputs, stage: str, array: np.ndarray) -> np.ndarray:
        x, n = inputs.heads(rope_input(stage[0], inputs.config)), int(value * config.head_dim) // 2 * 2
        angle = inputs.positions[:, None] * frequencies(n, inputs.config.rope_theta)
        return np.concatenate([rope(x[..., :n], np.cos(angle), np.sin(angle)), x[..., n:]], axis=-1)

    return Hypothesis(
        "rope-rotated-share", "setting", ROTATED,
        f"{_format(value)} of each head is rotated here (partial rotary embedding); Llama and Qwen rotate all of it.",
        lambda stage_keys: Change(dict.fromkeys(stage_keys, StageChange(wrong))), _format(value),
    )  # fmt: skip


def _scores_scale(config: ModelConfig, value: float) -> Hypothesis:
    right = config.head_dim**-0.5
    return Hypothesis(
        "scores-scale", "setting", ("attn_scores",),
        f"Products are multiplied by {_format(value)} here; the right factor is 1 / sqrt(head_dim) = {_format(right)}.",
        _change_stage(lambda scores: scores * (value / right)), _format(value),
    )  # fmt: skip


def _window(config: ModelConfig, value: float) -> Hypothesis:
    """Make the hypothesis that a token attends only to the last few tokens."""
    n = int(value)
    bounds = {layer.bound for layer in map(config.layer, range(config.n_layers))}

    def wrong(inputs: StageInputs, stage: str, scores: np.ndarray) -> np.ndarray:
        if inputs.kind.bound is not None:  # a wider window must also show keys
            return with_mask(inputs, stage, hidden_in(inputs, Layer(window=n)))
        return np.where(hidden_in(inputs, Layer(window=n)), -np.inf, scores)

    return Hypothesis(
        "mask-window", "setting", ("attn_scores",),
        f"A token sees the last {n} tokens only (a sliding window); this model's "
        f"{'attention has none' if bounds == {None} else 'config has another window'}.",
        lambda stage_keys: Change(dict.fromkeys(stage_keys, StageChange(wrong))), str(n),
    )  # fmt: skip


def _soft_cap(config: ModelConfig, value: float) -> Hypothesis:
    return Hypothesis(
        "soft-cap", "setting", CAPPED,
        f"x went through {_format(value)} * tanh(x / {_format(value)}), as in Gemma; Llama and Qwen have no cap.",
        _change_stage(lambda x: np.where(np.isfinite(x), value * np.tanh(x / value), x)), _format(value),
    )  # fmt: skip


def _scaled(config: ModelConfig, value: float) -> Hypothesis:
    return Hypothesis(
        "scaled", "setting", SCALED,
        f"The stage is {_format(value)} times the right result.", _change_stage(lambda x: x * value), _format(value),
    )  # fmt: skip


def _other_layer(config: ModelConfig, value: float) -> Hypothesis:
    """Make the hypothesis that the engine used the weights of another layer."""
    layer = int(value)

    def change(stage_keys: StageKeys) -> Change:
        names = {name for stage in {key.rpartition(".")[2] for key in stage_keys} for name in _weight_names(stage)}

        def exchange(setting: LayerSetting) -> LayerSetting:
            def weights(i: int | None) -> Mapping[str, Any]:
                return setting.layer_weights(i) if i is None else _replace_weights(setting, i, layer, names)

            return replace(setting, layer_weights=weights)

        return Change(setting=exchange)

    return Hypothesis(
        "weights-of-other-layer", "setting", WEIGHTED, f"The weights of layer {layer} were used here.", change,
        f"layer {layer}",
    )  # fmt: skip


def _weight_names(stage: str) -> tuple[str, ...]:
    matrix = BY_NAME[stage].matrix
    return (matrix, matrix.replace("_proj", "_bias")) if matrix else (stage,)


def _replace_weights(setting: LayerSetting, layer: int, other_layer: int, names: Container[str]) -> Mapping[str, Any]:
    """Return the weights of a layer, with some names replaced by the weights of another layer."""
    weights, other_weights = setting.layer_weights(layer), setting.layer_weights(other_layer)
    return {name: other_weights[name] if name in names else weights[name] for name in weights}


def _steps(first: int, last: int) -> list[float]:
    """List 1, 2 and 5 times the powers of ten from exponent `first` to `last`."""
    return [float(f"{digit}e{exponent}") for exponent in range(first, last + 1) for digit in (1, 2, 5)]


_SHARES = tuple(2.0**n for n in range(-6, 7))


def setting_families(config: ModelConfig) -> tuple[SettingFamily, ...]:
    """List the settings for which an engine may use another value than the configuration's.

    The last column is `refined` or `later` if the field of `SettingFamily` with this name is true. Of settings that
    explain an error equally well the first is named: at one position, an offset explains what a factor does.
    """
    rows: list[tuple[str, tuple[str, ...], Sequence[float], Callable[[ModelConfig, float], Hypothesis], str]] = [
        ("norm-eps", tuple(NORMS), (0.0, *_steps(-12, -3)), _eps, "refined"),
        ("rope-theta", ROTATED, _steps(2, 8), _theta, "refined"),
        ("rope-scaling-missing", ROTATED, (1.0,) if config.rope_scaling else (), _unscaled, ""),
        ("rope-llama3-factor", ROTATED, (2.0, 4.0, 8.0, 16.0, 32.0, 64.0), _llama3_factor, ""),
        ("rope-position-offset", ROTATED, [n for n in range(-16, 65) if n], _offset, "later"),
        ("rope-position-offset", ROTATED, [n for n in range(-16, 17) if n], partial(_offset, later_passes_only=True),
         "later"),
        ("rope-position-factor", ROTATED, _SHARES, _linear_scaling, "refined"),
        ("rope-rotated-share", ROTATED, (0.25, 0.5, 0.75), _rotated_share, ""),
        ("scores-scale", ("attn_scores",), [share * config.head_dim**-0.5 for share in _SHARES], _scores_scale,
         "refined"),
        ("mask-window", ("attn_scores",), range(1, 65), _window, "later"),
        ("soft-cap", CAPPED, (5.0, 15.0, 30.0, 50.0, 100.0), _soft_cap, "refined"),
        ("scaled", SCALED, (-1.0, config.hidden_size**0.5, *_SHARES), _scaled, "refined"),
        ("weights-of-other-layer", WEIGHTED, range(config.n_layers), _other_layer, ""),
    ]  # fmt: skip
    return tuple(
        SettingFamily(name, stages, values, partial(make, config), search_kind == "refined", search_kind == "later")
        for name, stages, values, make, search_kind in rows
        if values
    )


def rounding_hypotheses(config: ModelConfig) -> Iterator[Hypothesis]:
    """Yield the kinds of rounding that an engine may use without declaring them."""
    for name, kind in HALF.items():
        yield Hypothesis(
            f"cache-in-{name}", "rounding", ("k_cache", "v_cache"), f"Keys and values are kept in {name}.",
            _change_stage(partial(_rounded_to, kind=kind)), rounds=True, by_place=False,
        )  # fmt: skip
        for noun, rounding in (
            ("Weights", partial(_rounded_to, kind=kind)),
            ("Matrices", partial(_in_matrices, rounding=partial(_rounded_to, kind=kind))),
        ):
            yield Hypothesis(
                f"weights-in-{name}", "rounding", WEIGHTED, f"{noun} were rounded to {name}.",
                _change_setting(partial(_with_weights, rounding=rounding)), rounds=True, by_place=False,
            )  # fmt: skip
    yield Hypothesis(
        "cache-in-int8", "rounding", ("k_cache", "v_cache"), "Keys and values are kept in int8, with a scale a row.",
        _change_stage(_rounded_to_int8), rounds=True, by_place=False,
    )  # fmt: skip
    kinds: tuple[ActivationKind, ...] = ("F16", "BF16", "Q8_0", "Q8_K")
    for kind in kinds:
        if all(width % BLOCK_SIZE.get(kind, 1) == 0 for width in _widths(config)):
            yield _product_hypothesis(f"products-of-{kind.lower()}", kind, partial(_rounded_to, kind=kind))
    for rounding in (_to_tf32, _cut_to_tf32):
        yield _product_hypothesis("products-in-tf32", "TF32", rounding, weights=rounding)
    for kind in HALF.values():
        rounding = partial(_rounded_to, kind=kind)
        yield _product_hypothesis(f"products-in-{kind.lower()}", kind, rounding, weights=rounding)
        yield _product_hypothesis(
            f"products-kept-in-{kind.lower()}", kind, rounding, weights=rounding, results=rounding
        )


def _widths(config: ModelConfig) -> tuple[int, ...]:
    """Return the widths of the inputs that matrices multiply: hidden, queries, feed-forward."""
    return config.hidden_size, config.q_width, config.intermediate_size


def _product_hypothesis(
    name: str, kind: str, inputs: Callable[[np.ndarray], np.ndarray], weights: Callable[..., np.ndarray] | None = None,
    results: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Hypothesis:  # fmt: skip
    """Make the hypothesis that products round inputs, and weights and results if a rounding is passed for them.

    Without a rounding of weights, the products of attention, the last two of `PRODUCTS`, are exact.
    """
    noun = "Inputs, weights and results" if results else "Inputs and weights" if weights else "Inputs"

    def round_product(inputs: StageInputs, stage: str, array: np.ndarray) -> np.ndarray:
        """Round the product before the bias is added."""
        bias = inputs.weights.get(BY_NAME[stage].matrix.replace("_proj", "_bias")) if BY_NAME[stage].matrix else None
        return results(array) if bias is None else results(array - bias) + bias  # type: ignore[misc] (not None)

    def change(stage_keys: StageKeys) -> Change:
        layers = {stage_key.rpartition(".")[0] for stage_key in stage_keys}
        stages = (*PROJECTED, *ATTENDED) if weights else PROJECTED
        passed_on = {f"{layer}.{stage}" if layer else stage: inputs for layer in layers for stage in stages}
        matrices = partial(_in_matrices, rounding=weights) if weights else None
        change_weights = partial(_with_weights, rounding=matrices) if matrices else lambda setting: setting
        return Change(
            dict.fromkeys(stage_keys, StageChange(round_product)) if results else {}, passed_on, change_weights
        )

    return Hypothesis(
        name, "rounding", PRODUCTS if weights else PRODUCTS[:-2],
        f"{noun} of products are rounded to {kind}.", change, rounds=True, by_place=False,
    )  # fmt: skip


def _rounded_to(x: np.ndarray, kind: ActivationKind) -> np.ndarray:
    return round_activations(np.ascontiguousarray(x), kind)


def _rounded_to_int8(x: np.ndarray) -> np.ndarray:
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.rint(np.divide(x, step, out=np.zeros_like(x), where=step > 0)) * step


def _to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to TF32 (10 bits of mantissa), ties away from zero, like NVIDIA's tensor cores."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32).astype(x.dtype)


def _cut_to_tf32(x: np.ndarray) -> np.ndarray:
    """Truncate the mantissa to the 10 bits of TF32."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(x.dtype)


def _in_matrices(x: Any, rounding: Callable[..., np.ndarray]) -> np.ndarray:
    """Round a matrix, or each matrix of a stack of experts; return vectors unchanged."""
    if len(x.shape) == 3:  # stacked experts; stays an array for the next rounding
        return np.stack([rounding(matrix) for matrix in x])
    return rounding(x) if x.ndim == 2 else x


def _with_weights(setting: LayerSetting, rounding: Callable[..., np.ndarray]) -> LayerSetting:
    return replace(setting, layer_weights=lambda layer: _rounded_weights(setting.layer_weights(layer), rounding))


def _rounded_weights(weights: Mapping[str, Any], rounding: Callable[..., np.ndarray]) -> Mapping[str, Any]:
    return ChangedWeights(
        weights, lambda name, weight: rounding(weight.dequantize() if isinstance(weight, QuantMethod) else weight)
    )


class ChangedWeights(Mapping[str, Any]):
    """Weights that are changed whenever they are read; `change` is called with the name and the weight."""

    def __init__(self, weights: Mapping[str, Any], change: Callable[[str, Any], Any]) -> None:
        """Store the weights and the change."""
        self._weights, self._change = weights, change

    def __getitem__(self, name: str) -> Any:
        return self._change(name, self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
