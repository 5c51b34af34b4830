"""Tolerance of the common factor of a stage in half precision, a part of the tolerance of `tolerances.forward`.

Half precision hides an error that multiplies all values by nearly 1, as a wrong constant does, unless the factor has a
tolerance of its own. With y the golden and e the error of a run, the factor is 1 + sum(e y) / sum(y y). Rounding errors
are independent, so separately rounded elements would move it by sqrt(sum(v y y)) / sum(y y), where v are variances of
e. Yet one rounding may move many elements: a rounded weight moves all tokens, and a rounded input moves all channels of
its token. Within a group of elements that share a rounding, the errors may all have the signs of y. Then
(Cauchy-Schwarz inequality)

    variance of the factor <= sum over groups g of (sum of y y in g) (sum of v in g) / sum(y y)^2

A stage whose roundings are shared in two ways, along tokens and along channels, may use the sum of both. `SHARED`
says which axes the elements of a group have in common. An empty entry is one group of all elements: there a factor is
indistinguishable from rounding, and the bound is no tighter than the tolerance of the whole error.

A rounded gain multiplies its channel g by a factor, which adds u^2 (sum of y y in g)^2 / sum(y y)^2, where u is half a
step.

The tolerance is 4 roots, as for errors, and at least half a step of the dtype, because a run may round one scale of the
whole array. The derivation assumes that the inputs are the golden's. In a chained pass, norms pass on errors of all
earlier stages as factors of whole rows, so no bound is derived.
"""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from llorch.families.config import ModelConfig
from llorch.judging.tolerances.rounding import Arithmetic
from llorch.stages.comparison import FACTOR
from llorch.stages.table import Stage, axis_sizes

_ALL = ("",)  # one group of all elements
_GAINS = {  # norm -> axis of its gain
    **dict.fromkeys(("attn_norm", "ffn_norm", "final_norm"), "hidden"),
    **dict.fromkeys(("q_norm", "k_norm"), "head_dim"),
    "gated_norm": "value_dim",
}
_PARTS = {"q_width": "kv_heads group head_dim", "value_width": "v_heads value_dim"}  # joined axis -> its axes
# Stage -> for each source of shared roundings: the axes that the elements of a group have in common.
SHARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "q_rope": ("seq heads",),  # an input moves both elements of its pair
        "k_rope": ("seq kv_heads",),
        "attn_scores": ("heads seq", "ctx"),  # a query, a key
        "attn_probs": ("heads seq",),
        "attn_context": ("seq", "kv_heads head_dim"),  # probabilities of a query, a value
        "conv_out": ("conv_width",),  # the kernel
        "log_decay": ("v_heads",),
        "delta_state": _ALL,  # a key or a decay moves all later tokens of a head
        "delta_out": _ALL,
        "router_probs": ("seq",),
        "topk_weights": ("seq",),
        "expert_in": ("seq topk", "seq hidden"),
        "shared_gate": ("seq", "one"),
        "moe_out": ("seq",),
    }
)  # `_groups` adds products; the elements of all other stages are rounded separately


def limit_of_factor(
    golden: np.ndarray, variance: np.ndarray, stage: Stage, config: ModelConfig, arithmetic: Arithmetic, *, fused: bool
) -> float:
    """Derive the largest allowed distance from 1 of the common factor of an isolated stage, in half precision.

    `variance` holds the expected squared errors of the elements. `fused`: attention hides its scores, so a rounded key
    moves all later queries.
    """
    names = [name for axis in stage.axes.split() for name in _PARTS.get(axis, axis).split()]
    shape = _shape(stage, golden.shape, names, config)
    is_finite = np.isfinite(golden)
    squares = np.square(np.where(is_finite, golden, 0), dtype=np.float64).reshape(shape)
    variance = np.where(is_finite, variance, 0).astype(np.float64).reshape(shape)
    factor_variance = 0.0
    for shared in _ALL if fused and stage.name == "attn_context" else _groups(stage, names):
        sum_group = partial(np.sum, axis=_other_axes(names, shared))
        factor_variance += float((sum_group(squares) * sum_group(variance)).sum())
    if stage.name in _GAINS:
        gain_squares = squares.sum(axis=_other_axes(names, _GAINS[stage.name]))
        factor_variance += arithmetic.unit**2 * float(np.square(gain_squares).sum())
    return max(arithmetic.unit, FACTOR * math.sqrt(factor_variance) / (float(squares.sum()) or 1.0))


def _other_axes(names: list[str], shared: str) -> tuple[int, ...]:
    """Return the axes along which the elements of a group differ."""
    return tuple(axis for axis, name in enumerate(names) if name not in shared.split())


def _groups(stage: Stage, names: list[str]) -> tuple[str, ...]:
    """Return the common axes of groups, as in `SHARED`; for a product, those of an input row and of a weight row."""
    if stage.matrix:
        return "seq", names[-1]
    return SHARED.get(stage.name, (" ".join(names),))


def _shape(stage: Stage, shape: tuple[int, ...], names: list[str], config: ModelConfig) -> list[int]:
    """Return the sizes of the axes after joined axes are split."""
    joined = dict(zip(stage.axes.split(), shape, strict=True))
    sizes = axis_sizes(config, seq=joined.get("seq", 0), ctx=joined.get("ctx", 0)) | {"group": config.group_size}
    return [sizes[name] for name in names]
