"""Tolerance of the common factor of a stage in half precision, collected by `tolerances.forward`.

With y the golden and e the error of a run, the factor is 1 + sum(e y) / sum(y y). Rounding errors are independent, so
single elements that were rounded on their own would move it by sqrt(sum(v y y)) / sum(y y), where v are variances of e.
Yet one rounding may move many elements: a rounded weight moves all tokens, a rounded input all channels of its token.
Within a group of elements that share a rounding the errors may all have the signs of y. Then (Cauchy and Schwarz)

    variance of the factor <= sum over groups g of (sum of y y in g) (sum of v in g) / sum(y y)^2

A stage whose roundings are shared in two ways, along tokens and along channels, may use the sum of both. `SHARED`
says which axes the elements of a group have in common. An empty entry is one group of all: there a factor is
indistinguishable from rounding, and the bound is no tighter than the limit of the whole error.

A rounded gain multiplies its channel g by a factor, which adds u^2 (sum of y y in g)^2 / sum(y y)^2, where u is half a
step.

The tolerance is 4 roots, as for errors, and at least half a step of the dtype, because a run may round one scale of the
whole array. The derivation needs inputs that are the golden's. In a chained pass the norms hand on errors of all
earlier stages as factors of whole rows, and no bound is derived.
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

_ALL = ("",)  # one group
_GAINS = {
    **dict.fromkeys(("attn_norm", "ffn_norm", "final_norm"), "hidden"),
    **dict.fromkeys(("q_norm", "k_norm"), "head_dim"),
    "gated_norm": "value_dim",
}
_PARTS = {"q_width": "kv_heads group head_dim", "value_width": "v_heads value_dim"}  # of joined axes
SHARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "q_rope": ("seq heads",),  # an input moves both elements of its pair
        "k_rope": ("seq kv_heads",),
        "attn_scores": ("heads seq", "ctx"),  # a query, a key
        "attn_probs": ("heads seq",),
        "attn_context": ("seq", "kv_heads head_dim"),  # probabilities of a query, a value
        "conv_out": ("conv_width",),  # the kernel
        "log_decay": ("v_heads",),
        "delta_state": _ALL,  # a key, a decay: all that follows in a head
        "delta_out": _ALL,
        "router_probs": ("seq",),
        "topk_weights": ("seq",),
        "expert_in": ("seq topk", "seq hidden"),
        "shared_gate": ("seq", "one"),
        "moe_out": ("seq",),
    }
)  # products have `_product_variance`; the elements of all other stages are rounded on their own


def limit_of_factor(
    golden: np.ndarray, variance: np.ndarray, stage: Stage, config: ModelConfig, arithmetic: Arithmetic, *, fused: bool
) -> float:
    """Derive how far the common factor of an isolated stage may be from 1, in half precision.

    `variance` are the expected squared errors of the elements. `fused`: attention hides its scores, and a rounded key
    moves all later queries.
    """
    names = [name for axis in stage.axes.split() for name in _PARTS.get(axis, axis).split()]
    shape = _shape(stage, golden.shape, names, config)
    known = np.isfinite(golden)
    squares = np.square(np.where(known, golden, 0), dtype=np.float64).reshape(shape)
    variance = np.where(known, variance, 0).astype(np.float64).reshape(shape)
    made = 0.0
    for shared in _ALL if fused and stage.name == "attn_context" else _groups(stage, names):
        of_group = partial(np.sum, axis=_others(names, shared))
        made += float((of_group(squares) * of_group(variance)).sum())
    if stage.name in _GAINS:
        of_gain = squares.sum(axis=_others(names, _GAINS[stage.name]))
        made += arithmetic.unit**2 * float(np.square(of_gain).sum())
    return max(arithmetic.unit, FACTOR * math.sqrt(made) / (float(squares.sum()) or 1.0))


def _others(names: list[str], shared: str) -> tuple[int, ...]:
    return tuple(axis for axis, name in enumerate(names) if name not in shared.split())


def _groups(stage: Stage, names: list[str]) -> tuple[str, ...]:
    """Name the axes along which elements share a rounding; for a product those of an input and of a weight."""
    if stage.matrix:
        return "seq", names[-1]
    return SHARED.get(stage.name, (" ".join(names),))


def _shape(stage: Stage, shape: tuple[int, ...], names: list[str], config: ModelConfig) -> list[int]:
    """Return the sizes of the axes when joined ones are split."""
    found = dict(zip(stage.axes.split(), shape, strict=True))
    sizes = axis_sizes(config, seq=found.get("seq", 0), ctx=found.get("ctx", 0)) | {"group": config.group_size}
    return [sizes[name] for name in names]
