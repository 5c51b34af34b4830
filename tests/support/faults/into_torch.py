"""Faults of the forward pass in torch, and the runs that they are injected into: of goldens, and of engines now.

A fault breaks a loaded model or the functions that it calls.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stored_goldens import suite_of_case, weights_of
from helpers.torch_targets import target_or_skip
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from faults.fault import InjectedFault
from faults.into_numpy import live_suite
from llorch.apps.learn.lessons import PARTS
from llorch.apps.learn.typed_mistakes import make_typed_mistakes
from llorch.files import Weights
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners.torch import VARIANTS, TorchRunner, TorchVariant, plain
from llorch.judging.types import Comparison
from llorch.ops.rope import rope_tables
from llorch.pytorch import causal_lm as torch_model
from llorch.pytorch import decoding, sampling
from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Block, CausalLM, attention
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel

BreakModel = Callable[[CausalLM, pytest.MonkeyPatch], None]


def of_golden(fault: InjectedFault, patch: pytest.MonkeyPatch, _: Path) -> list[Comparison]:
    """Comparisons of a model with a fault, in the order of the forward pass."""
    base = VARIANTS[fault.variant]

    def make(weights: Weights, target: Target) -> TorchModel:
        model = base.make(weights, target)
        FAULTS[fault.name](model.module, patch)
        return model

    variant, name = TorchVariant(make, hidden=base.hidden, in_batch=base.in_batch), f"torch-cpu-{fault.dtype}"
    runner = TorchRunner(weights_of(fault.model), target_or_skip(name), variant, f"{name}-broken")
    rows = getattr(RunnerCheck(suite_of_case(fault.model, fault.case), runner), fault.rows)()
    return [row for row in rows if row.mode != "isolated" or row.stage_ref.checkpoint == "11"]


def live(fault: InjectedFault, patch: pytest.MonkeyPatch, folder: Path) -> list[Comparison]:
    """Comparisons of decoding and sampling with both engines, which ran on a random model with many tokens."""
    suite, name = live_suite(fault.model, folder), f"torch-cpu-{fault.dtype}"

    def make(weights: Weights, target: Target) -> TorchModel:
        model = plain(weights, target)
        FAULTS[fault.name](model.module, patch)
        return model

    runner = TorchRunner(suite.weights, target_or_skip(name), TorchVariant(make, hidden=frozenset()), name)
    return [*(check := RunnerCheck(suite, runner)).decode_rows(), *check.sampler_rows()]


def method(owner: Any, name: str, make: Callable[[Any], Any]) -> BreakModel:
    """Replace a function or method by one made from it."""
    return lambda module, patch: patch.setattr(owner, name, make(getattr(owner, name)))


def placed(change: Callable[[Cache, PassPlacement, Tensor], dict[str, Any]]) -> BreakModel:
    """Change the places that the cache gives."""

    def make(place: Any) -> Any:
        def wrong(self: Cache, positions: Tensor, **kwargs: Any) -> PassPlacement:
            right = place(self, positions, **kwargs)
            return PassPlacement(**vars(right) | change(self, right, positions))

        return wrong

    return method(Cache, "place", make)


def off_by_one_in_padded_rows(cache: Cache, place: PassPlacement, positions: Tensor) -> dict[str, Any]:
    slots = (place.slots + (positions < 0).any(-1, keepdim=True)).clamp(max=cache.n_slots)
    return {"cos": cache.cos[slots], "sin": cache.sin[slots]}


def mask_by_columns(cache: Cache, place: PassPlacement, positions: Tensor) -> dict[str, Any]:
    columns = torch.arange(positions.shape[1])[None, None, :, None]
    return {"visible": (torch.arange(place.ctx) <= columns).expand(len(positions), 1, -1, -1)}


def tables(change: Callable[[Cache, Any], None]) -> BreakModel:
    """Change the tables of angles of every cache."""

    def make(init: Any) -> Any:
        def wrong(self: Cache, config: Any, **kwargs: Any) -> None:
            init(self, config, **kwargs)
            change(self, config)

        return wrong

    return method(Cache, "__init__", make)


def of_other_angles(cache: Cache, config: Any, *, first: int, scaling: Any) -> None:
    n, head_dim, theta = cache.n_slots + 1, config.head_dim, config.rope_theta
    made = rope_tables(torch.arange(first, first + n).numpy(), head_dim=head_dim, theta=theta, scaling=scaling)
    cache.cos, cache.sin = (torch.from_numpy(table).to(cache.cos) for table in made)


def in_bfloat16(cache: Cache, config: Any) -> None:
    cache.cos, cache.sin = (table.bfloat16().to(table.dtype) for table in (cache.cos, cache.sin))


def appended(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> BreakModel:
    """Change the keys and values that the cache takes."""
    return method(
        Cache, "append", lambda append: lambda cache, layer, k, v, place: append(cache, layer, *change(k, v), place)
    )


def never_again(append: Any) -> Any:
    """Keep the keys and values that an earlier answer wrote."""

    def wrong(cache: Cache, layer: int, k: Tensor, v: Tensor, place: PassPlacement) -> Any:
        old = cache.keys[layer].clone()
        append(cache, layer, k, v, place)
        cache.keys[layer].copy_(torch.where(old.any(-1, keepdim=True), old, cache.keys[layer]))
        return cache.keys[layer][:, :, : place.ctx], cache.values[layer][:, :, : place.ctx]

    return wrong


def of_library(part: str, name: str) -> BreakModel:
    """Put a mistake of the library into the torch function of lesson 14 that it replaces."""
    wrong = make_typed_mistakes(PARTS[f"torch_{part}"])[name]
    return method(torch_model, part, lambda right: wrong)


def tiled(q: Tensor, keys: Tensor, values: Tensor, visible: Any, keep: Any) -> Tensor:
    n = q.shape[2] // keys.shape[1]
    return attention(q, keys.repeat(1, n, 1, 1), values.repeat(1, n, 1, 1), visible, keep)


def fused(**kwargs: Any) -> Callable[..., Tensor]:
    """Torch's fused attention without llorch's mask."""
    return lambda q, keys, values, visible, keep: scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, enable_gqa=True, is_causal=True, **kwargs
    ).transpose(1, 2)


def changed_stage(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """The page's attention, one of its stages changed on the way."""
    return lambda q, keys, values, visible, keep: attention(
        q, keys, values, visible, lambda stage, x: keep(stage, change(x) if stage == name else x)
    )


def cut_to_10_bits(x: Tensor) -> Tensor:
    """Round float32 inputs to TF32; leave other dtypes unchanged."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x


def product_of_10_bits(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(cut_to_10_bits(x), cut_to_10_bits(self.weight), self.bias)


def norm_rounded_before_gain(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed.bfloat16() * weight).to(x.dtype)


def in_every_layer(change: Callable[[Any], None]) -> BreakModel:
    """Change the modules of every layer."""

    def break_model(module: CausalLM, patch: pytest.MonkeyPatch) -> None:
        for layer in module.model.layers:
            change(layer)

    return break_model


def attending(attend: Callable[..., Tensor]) -> BreakModel:
    """Another attention in every layer."""
    return in_every_layer(lambda layer: setattr(layer.self_attn, "attend", attend))


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

    def wrong(logits: Tensor, *args: Any) -> Any:
        token, logprob = choose(logits, *args)
        return (token + 1) % logits.shape[-1], logprob

    return wrong


def norms_swapped(layer: Any) -> None:
    layer.self_attn.q_norm, layer.self_attn.k_norm = layer.self_attn.k_norm, layer.self_attn.q_norm


def gate_and_up_swapped(layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


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
    def wrong(self: CausalLM, ids: Tensor, *args: Any, rows: Any = None, **kwargs: Any) -> Any:
        rows = None if rows is None else torch.full_like(rows, ids.shape[1] - 1)
        return forward(self, ids, *args, rows=rows, **kwargs)

    return wrong


FAULTS: dict[str, BreakModel] = {
    "none": lambda module, patch: None,
    "rope pairs interleaved": of_library("rope", "rope-interleaved-pairs"),
    "rope of keys missing": method(
        torch_model, "rope", lambda right: lambda x, *tables: x if x.shape[2] == 3 else right(x, *tables)
    ),
    "position off by one in padded rows": placed(off_by_one_in_padded_rows),
    "mask of columns ignores padding": placed(mask_by_columns),
    "padding written over slot 0": placed(
        lambda cache, place, positions: {"slots": torch.where(positions < 0, 0, place.slots)}
    ),
    "first position ignored": tables(
        lambda cache, config: of_other_angles(cache, config, first=0, scaling=config.rope_scaling)
    ),
    "rope scaling ignored": tables(
        lambda cache, config: of_other_angles(cache, config, first=cache.first_position, scaling=None)
    ),
    "rope tables in bfloat16": tables(in_bfloat16),
    "fused attention without scale": attending(fused(scale=1.0)),
    "causal mask aligned to the first slot": attending(fused()),
    "grouped heads tiled": attending(tiled),
    "scores not scaled": attending(changed_stage("attn_scores", lambda x: x * 2)),
    "probabilities in bfloat16": attending(changed_stage("attn_probs", lambda x: x.bfloat16().to(x.dtype))),
    "eps outside the root": of_library("rms_norm", "norm-eps-outside-root"),
    "norm rounded before the gain": method(torch_model, "rms_norm", lambda _: norm_rounded_before_gain),
    "gain missing": of_library("rms_norm", "norm-gain-missing"),
    "products of 10 bits": method(nn.Linear, "forward", lambda _: product_of_10_bits),
    "bias of queries missing": in_every_layer(lambda layer: setattr(layer.self_attn.q_proj, "bias", None)),
    "norms of queries and keys swapped": in_every_layer(norms_swapped),
    "last token not cached": appended(lambda k, v: (k * (torch.arange(k.shape[1]) < k.shape[1] - 1)[:, None, None], v)),
    "keys cached as values": appended(lambda k, v: (k, k)),
    "keys of the first row for all": appended(lambda k, v: (k[:1].expand_as(k), v)),
    "cache of an earlier answer kept": method(Cache, "append", never_again),
    "one cache for all layers": method(
        Cache, "append", lambda append: lambda cache, layer, *args: append(cache, 0, *args)
    ),
    "residual from the norm": method(Block, "forward", residual_from_norm),
    "gate and up swapped": in_every_layer(gate_and_up_swapped),
    "gelu for silu": in_every_layer(lambda layer: setattr(layer.mlp, "act", lambda gate, up: gelu(gate) * up)),
    "tied head not tied": head_of_its_own,
    "context lost after a cache": attending(
        lambda q, keys, *args: attention(q, keys, *args) * (q.shape[1] == keys.shape[2])
    ),
    "logits constant": constant_logits,
    "token after the best one": method(decoding, "choose", token_after),
    "top-p drops the crossing token": method(sampling, "keep_first", least_dropped),
    "last column for the last token": method(CausalLM, "forward", last_column),
    "penalty missing": method(sampling, "penalise", lambda _: lambda logits, token_marks, penalty: logits),
    "min-p missing": method(sampling, "keep_min_p", lambda _: lambda logits, min_p: logits),
}
