"""Known mistakes planted into the torch page and its leaves, and where each has to show."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from inject.planted_torch_cache import (
    Plant,
    appended,
    from_position_0,
    in_bfloat16,
    keys_as_values,
    mask_by_columns,
    method,
    never_again,
    not_the_last,
    of_one_layer,
    of_the_first_row,
    off_by_one_in_padded_rows,
    padding_in_slot_0,
    placed,
    tables,
    unscaled,
)  # fmt: skip
from llorch.learn.lessons import PARTS
from llorch.learn.typed import typed
from llorch.pytorch import causal_lm as torch_model
from llorch.pytorch import decoding, sampling
from llorch.pytorch.causal_lm import Block, CausalLM, attention, keep_nothing, rope


@dataclass(frozen=True)
class Planted:
    """One mistake.

    Attributes:
        plant: Breaks a loaded model.
        shows: Checkpoint, stage and layer of the first row that must fail.
        model: A built-in model that can show it.
        case: Its input.
        rows: Which rows of the verifier are looked at.
        base: The variant that is broken.
        of_rounding: Whether half precision cannot show it.
    """

    plant: Plant
    shows: tuple[str, str, int | None]
    model: str = "micro-qwen3"
    case: str = "near"
    rows: str = "stage_rows"
    base: str = ""
    of_rounding: bool = False


def of_library(part: str, name: str) -> Plant:
    """Put a mistake of the library into the torch function of lesson 14 that it replaces."""
    wrong = typed(PARTS[f"torch_{part}"])[name]
    return method(torch_model, part, lambda right: wrong)


def tiled(q: Tensor, keys: Tensor, values: Tensor, visible: Any, keep: Any) -> Tensor:
    n = q.shape[2] // keys.shape[1]
    return attention(q, keys.repeat(1, n, 1, 1), values.repeat(1, n, 1, 1), visible, keep)


def fused(**how: Any) -> Callable[..., Tensor]:
    """Torch's fused attention without a mask of ours."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Any, keep: Any) -> Tensor:
        heads = scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True, is_causal=True, **how)
        return heads.transpose(1, 2)

    return attend


def changed_stage(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """The page's attention, one of its stages changed on the way."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Any, keep: Any) -> Tensor:
        return attention(q, keys, values, visible, lambda s, x: keep(s, change(x) if s == name else x))

    return attend


def cut_to_10_bits(x: Tensor) -> Tensor:
    """As TF32 takes its inputs; other dtypes are left alone."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x


def norm_rounded_before_gain(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed.bfloat16() * weight).to(x.dtype)


def in_every_layer(change: Callable[[Any], None]) -> Plant:
    """Change the modules of every layer."""

    def plant(module: CausalLM, patch: pytest.MonkeyPatch) -> None:
        for layer in module.model.layers:
            change(layer)

    return plant


def attending(attend: Callable[..., Tensor]) -> Plant:
    """Another attention in every layer."""
    return in_every_layer(lambda layer: setattr(layer.self_attn, "attend", attend))


def context_lost(q: Tensor, keys: Tensor, values: Tensor, visible: Any, keep: Any) -> Tensor:
    """Nothing once there is a cache."""
    return attention(q, keys, values, visible, keep) * (q.shape[1] == keys.shape[2])


def least_dropped(keep_first: Any) -> Any:
    """The token that carries the sum over p is removed."""

    def wrong(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        kept = keep_first(logits, top_k, top_p)
        least = kept.masked_fill(kept.isneginf(), torch.inf).amin(-1, keepdim=True)
        return kept.masked_fill((kept == least) & (top_p < 1), -torch.inf)

    return wrong


def constant_logits(module: CausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module.lm_head, "forward", lambda x, right=module.lm_head.forward: right(x) * 0 + 1)


def token_after(choose: Any) -> Any:
    """The token behind the most likely one, in generation alone."""

    def wrong(logits: Tensor, *given: Any) -> Any:
        token, logprob = choose(logits, *given)
        return (token + 1) % logits.shape[-1], logprob

    return wrong


def norms_swapped(layer: Any) -> None:
    layer.self_attn.q_norm, layer.self_attn.k_norm = layer.self_attn.k_norm, layer.self_attn.q_norm


def gate_and_up_swapped(layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def without_bias(layer: Any) -> None:
    layer.self_attn.q_proj.bias = None


def with_gelu(layer: Any) -> None:
    layer.mlp.act = lambda gate, up: gelu(gate) * up


def head_of_its_own(module: CausalLM, patch: pytest.MonkeyPatch) -> None:
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.roll(1, 1), requires_grad=False)


def residual_from_norm(block: Any) -> Any:
    def forward(self: Block, x: Tensor, place: Any, cache: Any, keep: Any) -> Tensor:
        h = keep("attn_norm", self.input_layernorm(x))
        x = keep("attn_residual", h + self.self_attn(h, place, cache, keep))
        h = keep("ffn_norm", self.post_attention_layernorm(x))
        return keep("block_out", x + self.mlp(h, keep))

    return forward


def last_column(forward: Any) -> Any:
    def wrong(
        self: CausalLM, ids: Tensor, place: Any, cache: Any, *, keep: Any = keep_nothing, rows: Any = None
    ) -> Any:
        rows = None if rows is None else torch.full_like(rows, ids.shape[1] - 1)
        return forward(self, ids, place, cache, keep=keep, rows=rows)

    return wrong


PLANTED = {
    "rope pairs interleaved": Planted(of_library("rope", "rope-interleaved-pairs"), ("01b", "q_rope", 0)),
    "rope of keys missing": Planted(
        method(torch_model, "rope", lambda _: lambda x, cos, sin: x if x.shape[2] == 3 else rope(x, cos, sin)),
        ("01b", "k_rope", 0),
    ),
    "position off by one in padded rows": Planted(
        placed(off_by_one_in_padded_rows), ("01b", "q_rope", 0), base="-batch"
    ),
    "mask of columns ignores padding": Planted(placed(mask_by_columns), ("04", "attn_scores", 0), base="-batch"),
    "padding written over slot 0": Planted(
        placed(padding_in_slot_0), ("03", "k_cache", 0), base="-batch", rows="decode_rows"
    ),
    "first position ignored": Planted(tables(from_position_0), ("01b", "q_rope", 0), case="far"),
    "rope scaling ignored": Planted(tables(unscaled), ("01b", "q_rope", 0), model="micro-llama3", case="far"),
    "rope tables in bfloat16": Planted(tables(in_bfloat16), ("01b", "q_rope", 0), of_rounding=True),
    "fused attention without scale": Planted(
        attending(fused(scale=1.0)), ("05", "attn_context", 0), base="-sdpa"
    ),
    "causal mask aligned to the first slot": Planted(
        attending(fused()), ("03", "attn_context", 0), base="-sdpa", rows="decode_rows"
    ),
    "grouped heads tiled": Planted(attending(tiled), ("04", "attn_scores", 0)),
    "scores not scaled": Planted(
        attending(changed_stage("attn_scores", lambda x: x * 2)), ("04", "attn_scores", 0)
    ),
    "probabilities in bfloat16": Planted(
        attending(changed_stage("attn_probs", lambda x: x.bfloat16().to(x.dtype))),
        ("04", "attn_probs", 0),
        of_rounding=True,
    ),
    "eps outside the root": Planted(
        of_library("rms_norm", "norm-eps-outside-root"), ("01", "attn_norm", 0), of_rounding=True
    ),
    "norm rounded before the gain": Planted(
        method(torch_model, "rms_norm", lambda _: norm_rounded_before_gain), ("01", "attn_norm", 0), of_rounding=True
    ),
    "gain missing": Planted(of_library("rms_norm", "norm-gain-missing"), ("01", "attn_norm", 0)),
    "products of 10 bits": Planted(
        method(nn.Linear, "forward", lambda _: lambda self, x: linear(
            cut_to_10_bits(x), cut_to_10_bits(self.weight), self.bias
        )),
        ("02", "q_proj", 0),
        of_rounding=True,
    ),
    "bias of queries missing": Planted(in_every_layer(without_bias), ("02", "q_proj", 0), model="micro-qwen2"),
    "norms of queries and keys swapped": Planted(in_every_layer(norms_swapped), ("02", "q_norm", 0)),
    "last token not cached": Planted(appended(not_the_last), ("03", "k_cache", 0)),
    "keys cached as values": Planted(appended(keys_as_values), ("03", "v_cache", 0)),
    "keys of the first row for all": Planted(appended(of_the_first_row), ("03", "k_cache", 0), base="-batch"),
    "cache of an earlier answer kept": Planted(appended(never_again), ("03", "k_cache", 0), rows="decode_rows"),
    "one cache for all layers": Planted(appended(of_one_layer), ("03", "k_cache", 0), rows="decode_rows"),
    "residual from the norm": Planted(method(Block, "forward", residual_from_norm), ("05", "attn_residual", 0)),
    "gate and up swapped": Planted(in_every_layer(gate_and_up_swapped), ("06", "ffn_gate", 0)),
    "gelu for silu": Planted(in_every_layer(with_gelu), ("06", "ffn_act", 0)),
    "tied head not tied": Planted(head_of_its_own, ("08", "logits", None), model="micro-qwen2"),
    "context lost after a cache": Planted(attending(context_lost), ("03", "attn_context", 0), rows="decode_rows"),
    "logits constant": Planted(constant_logits, ("09", "selected_logits", None), rows="sampler_rows"),
    "token after the best one": Planted(
        method(decoding, "choose", token_after), ("12", "generation", None), rows="sampler_rows"
    ),
    "top-p drops the crossing token": Planted(
        method(sampling, "keep_first", least_dropped), ("11", "probabilities.top_p", None), rows="sampler_rows"
    ),
    "last column for the last token": Planted(
        method(CausalLM, "forward", last_column), ("09", "selected_logits", None), base="-batch", rows="sampler_rows"
    ),
    "penalty missing": Planted(
        method(sampling, "penalise", lambda _: lambda logits, seen, penalty: logits),
        ("11", "probabilities.penalty", None),
        rows="sampler_rows",
    ),
    "min-p missing": Planted(
        method(sampling, "keep_min_p", lambda _: lambda logits, min_p: logits),
        ("11", "probabilities.min_p", None),
        rows="sampler_rows",
    ),
}  # fmt: skip
