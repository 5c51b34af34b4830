"""Known mistakes in projections, above all of q, k and v: bias, order of rows, input; `mistake` explains the fields."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.in_stage import PROJECTIONS, projected
from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.tensor_names import interleave, undo_interleave
from llorch.ops.linear import linear

QKV, PART = ("q_proj", "k_proj", "v_proj"), "linear"  # `part`: function that `wrong` replaces, see `in_stage`


def bias_twice(right: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Add the bias a second time."""

    def wrong(x: np.ndarray, weight: Any, bias: np.ndarray | None) -> np.ndarray:
        y = right(x, weight, bias)
        return y if bias is None else y + bias

    return wrong


def _n_heads(s: StageInputs, stage: str) -> int:
    return s.config.n_heads if stage == "q_proj" else s.config.n_kv_heads


def input_not_normalised(s: StageInputs, stage: str) -> np.ndarray:
    """Project the block's input instead of the normalised input."""
    _, weight, bias = projected(s, stage)
    return linear(s["block_in"], weight, bias)


def heads_interleaved(s: StageInputs, stage: str) -> np.ndarray:
    """Split outputs into (head_dim, heads) instead of (heads, head_dim)."""
    y = linear(*projected(s, stage))
    return _cut_with_heads_last(y, s.config).reshape(y.shape)


def _cut_with_heads_last(y: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Misread rows as (head_dim, heads) for each token; return (seq, heads, head_dim)."""
    return y.reshape(len(y), config.head_dim, -1).swapaxes(1, 2)  # (seq, heads, head_dim)


def heads_cut_last(s: StageInputs, stage: str) -> np.ndarray:
    """Split right projections into (head_dim, heads) where later stages need heads."""
    if stage == "v_cache":
        new = _cut_with_heads_last(s["v_proj"], s.config).swapaxes(0, 1)
        return np.concatenate([s["past_v"], new], axis=1)
    return s.rope(_cut_with_heads_last(s[f"{stage[0]}_proj"], s.config))


def heads_written_last(s: StageInputs, stage: str) -> np.ndarray:
    """Write outputs in the order (head_dim, heads) although they are read as (heads, head_dim)."""
    y = linear(*projected(s, stage))
    return y.reshape(len(y), -1, s.config.head_dim).swapaxes(1, 2).reshape(y.shape)


def fused_per_group(s: StageInputs, stage: str) -> np.ndarray:
    """Split the concatenated rows of q, k and v as if they were stored group by group."""
    rows = np.concatenate([linear(*projected(s, name)) for name in QKV], axis=1)
    rows = rows.reshape(len(rows), s.config.n_kv_heads, -1, s.config.head_dim)  # queries, key, value of a group
    part = {"q_proj": rows[:, :, :-2], "k_proj": rows[:, :, -2], "v_proj": rows[:, :, -1]}[stage]
    return part.reshape(len(rows), -1)


def keys_reordered_by_query_heads(s: StageInputs, stage: str) -> np.ndarray:
    """Interleave key rows by the number of query heads instead of the number of key heads."""
    n_heads, n_kv_heads = s.config.n_heads, s.config.n_kv_heads
    return _reorder_rows(s, stage, lambda rows: undo_interleave(interleave(rows, n_heads), n_kv_heads))


def _reorder_rows(s: StageInputs, stage: str, reorder: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    x, weight, bias = projected(s, stage)
    return linear(x, reorder(weight), None if bias is None else reorder(bias))


def output_heads_interleaved(s: StageInputs, stage: str) -> np.ndarray:
    """Read columns of o_proj as (head_dim, heads)."""
    x, weight, bias = projected(s, stage)
    columns = weight.reshape(len(weight), s.config.head_dim, -1).swapaxes(1, 2)  # (hidden, heads, head_dim)
    return linear(x, columns.reshape(weight.shape), bias)


def output_heads_written_last(s: StageInputs, stage: str) -> np.ndarray:
    """Write columns of o_proj in the order (head_dim, heads)."""
    x, weight, bias = projected(s, stage)
    columns = weight.reshape(len(weight), -1, s.config.head_dim).swapaxes(1, 2)  # (hidden, head_dim, heads)
    return linear(x, columns.reshape(weight.shape), bias)


def has_paired_rows(config: ModelConfig) -> bool:
    """Tell if GGUF files of the model's family interleave the rows of q and k."""
    return FAMILIES[config.family].layout.interleaved_rope == "gguf"


PROJECTION: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="weight-dimensions-not-reversed", stages=(*PROJECTIONS, "logits"), part=PART,
        wrong=lambda right: lambda x, weight, bias: right(x, weight.reshape(weight.shape[::-1]).T, bias),
        diagnosis="The weight was read as (in, out), its GGUF dimensions as they stand or a square matrix transposed; "
        "in memory it is (out, in) and y = x @ weight.T.",
    ),
    Mistake(
        name="weight-never-loaded", stages=(*PROJECTIONS, "logits"), part=PART,
        wrong=lambda right: lambda x, weight, bias: right(x, np.zeros_like(weight), bias),
        diagnosis="The weight is all zeros: it was never loaded, or under another name.",
    ),
    Mistake(
        name="qkv-bias-missing", stages=QKV, applies_to=lambda config: config.qkv_bias,
        part=PART, wrong=lambda right: lambda x, weight, bias: right(x, weight, None),
        diagnosis="The bias was not added; Qwen2 has one for queries, keys and values.",
    ),
    Mistake(
        name="qkv-bias-twice", stages=QKV, applies_to=lambda config: config.qkv_bias, part=PART, wrong=bias_twice,
        diagnosis="The bias was added twice.",
    ),
    Mistake(
        name="qkv-keys-and-values-swapped", stages=("k_proj", "v_proj"),
        wrong=lambda s, stage: s.linear("attn_norm", "v_proj" if stage == "k_proj" else "k_proj"),
        diagnosis="The weights of keys and values were exchanged; a fused matrix holds q, k, v in this order.",
    ),
    Mistake(
        name="qkv-input-not-normalised", stages=QKV, wrong=input_not_normalised, reads=("block_in",),
        diagnosis="The block's input was projected; q, k and v read attn_norm.",
    ),
    Mistake(
        name="qkv-heads-interleaved", stages=QKV, wrong=heads_interleaved,
        diagnosis="Outputs were cut into (head_dim, heads); the rows of one head lie together: (heads, head_dim).",
    ),
    Mistake(
        name="qkv-rows-with-heads-last", stages=QKV, wrong=heads_written_last,
        diagnosis="Rows were brought into the order (head_dim, heads); the rows of one head lie together.",
    ),
    Mistake(
        name="heads-cut-last", stages=("q_rope", "k_rope", "v_cache"), wrong=heads_cut_last,
        applies_to=lambda config: not config.qk_norm,
        diagnosis="A projection was cut into (head_dim, heads); it is one head after the other: (heads, head_dim).",
    ),
    Mistake(
        name="qkv-fused-per-group", stages=QKV, wrong=fused_per_group,
        diagnosis="A fused matrix was cut into groups (one key head with its queries and its value); it holds all "
        "queries, then all keys, then all values.",
    ),
    Mistake(
        name="qk-rows-left-interleaved", stages=("q_proj", "k_proj"), applies_to=has_paired_rows,
        wrong=lambda s, stage: _reorder_rows(s, stage, lambda rows: interleave(rows, _n_heads(s, stage))),
        diagnosis="Rows of q and k are in the interleaved order of Llama GGUF files; bring them to half-split order, "
        "or rotate neighbouring pairs.",
    ),
    Mistake(
        name="qk-rows-reordered-needlessly", stages=("q_proj", "k_proj"),
        applies_to=lambda config: not has_paired_rows(config),
        wrong=lambda s, stage: _reorder_rows(s, stage, lambda rows: undo_interleave(rows, _n_heads(s, stage))),
        diagnosis="Rows of q and k were reordered as for a Llama GGUF file; Qwen files are in half-split order.",
    ),
    Mistake(
        name="k-rows-reordered-by-query-heads", stages=("k_proj",), wrong=keys_reordered_by_query_heads,
        applies_to=lambda config: has_paired_rows(config) and config.kv_width % (2 * config.n_heads) == 0,
        diagnosis="Rows of k were reordered with the number of query heads; with grouped heads k has n_kv_heads.",
    ),
    Mistake(
        name="o-proj-heads-interleaved", stages=("attn_out",), wrong=output_heads_interleaved,
        diagnosis="Columns of o_proj were read as (head_dim, heads); its input is one head after the other.",
    ),
    Mistake(
        name="o-proj-columns-with-heads-last", stages=("attn_out",), wrong=output_heads_written_last,
        diagnosis="Columns of o_proj were brought into the order (head_dim, heads); one head's columns lie together.",
    ),
    Mistake(
        name="o-proj-skipped", stages=("attn_out",), wrong=lambda s, _: s["attn_context"],
        applies_to=lambda config: config.q_width == config.hidden_size,
        diagnosis="The joined heads were not projected; o_proj mixes them back into the residual stream.",
    ),
)  # fmt: skip
