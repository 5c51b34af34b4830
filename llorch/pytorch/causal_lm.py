"""Forward pass of Llama and Qwen as torch modules in one file: batched, on any device, in any float dtype.

Attribute paths are those of transformers, so tensor names need no mapping. A stage is a named intermediate tensor of
`llorch.stages.table`; every line that computes one passes it to `keep`, the observer. A kernel replaces a module (a
projection, a norm, `attend`, `rotate`, `act`) and has the same interface; nothing here depends on kernels.

Sums of norms, scores and softmax and all rotations are at least float32 and are rounded once, also in float16 and
bfloat16; in float64 nothing is rounded in between.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from llorch.families.config import ModelConfig
from llorch.model.forward import dense_only
from llorch.pytorch.cache import Cache, Context, PassPlacement, Visible

Keep = Callable[[str, Tensor], Tensor]  # (stage name, stage) -> the stage, or a tensor that replaces it
PartsOf = Callable[[ModelConfig, int], Mapping[str, nn.Module]]  # (config, layer) -> modules that replace dense ones
Hidden = Float[Tensor, "batch seq hidden"]
Heads = Float[Tensor, "batch seq _heads head_dim"]


def keep_nothing(name: str, array: Tensor) -> Tensor:
    """Return a stage unchanged: the `keep` of a run without an observer."""
    return array


class CausalLM(nn.Module):
    """The complete model: embedding, layers, final norm, logits."""

    def __init__(self, config: ModelConfig, parts_of: PartsOf = dense_only) -> None:
        """Build the modules; `llorch.pytorch.load` sets weights, `llorch.pytorch.models.families` gives `parts_of`."""
        super().__init__()
        self.config = config
        self.model = Decoder(config, parts_of)
        self.lm_head: Any = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        place: PassPlacement,
        cache: Cache,
        *,
        keep: Keep = keep_nothing,
        rows: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch rows vocab"]:
        """Compute logits of new tokens, which follow the tokens in the cache.

        Padding may have any token id. `keep` is called with the name and the tensor of every stage; its return value
        replaces the stage. `rows` selects one token per sequence; None computes the logits of all tokens.
        """
        cache.require_device(ids=ids, weights=self.model.norm.weight)
        x = self.model(ids, place, cache, keep)
        x = x if rows is None else x[torch.arange(len(rows), device=x.device), rows][:, None]  # (batch, 1, hidden)
        return keep("logits", self.lm_head(keep("final_norm", self.model.norm(x))))


class Decoder(nn.Module):
    """Embedding and layers; `CausalLM` applies the final norm to the selected rows."""

    def __init__(self, config: ModelConfig, parts_of: PartsOf) -> None:
        """Build the modules."""
        super().__init__()
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, i, parts_of(config, i)) for i in range(config.n_layers)])
        self.norm: Any = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Int[Tensor, "batch seq"], place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the hidden states after the last layer."""
        x = keep("embed", self.embed_tokens(ids))
        for i, block in enumerate(self.layers):

            def keep_layer(name: str, array: Tensor, prefix: str = f"l{i}.") -> Tensor:
                return keep(prefix + name, array)

            x = block(x, place, cache, keep_nothing if keep is keep_nothing else keep_layer)
        return x


class Block(nn.Module):
    """One layer: attention and feed-forward, each on normalised input, each added to the residual stream."""

    self_attn: Any  # or linear_attn, where the layer is a delta net

    def __init__(self, config: ModelConfig, layer: int, parts: Mapping[str, nn.Module]) -> None:
        """Build the modules of one layer; `parts` replace dense modules."""
        super().__init__()
        self.mixer = "linear_attn" if "linear_attn" in parts else "self_attn"
        self.input_layernorm: Any = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_module(self.mixer, parts.get(self.mixer) or Attention(config, layer))
        self.post_attention_layernorm: Any = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: Any = parts.get("mlp") or MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the residual stream after the layer."""
        h = keep("attn_norm", self.input_layernorm(x))
        x = keep("attn_residual", x + getattr(self, self.mixer)(h, place, cache, keep))
        h = keep("ffn_norm", self.post_attention_layernorm(x))
        return keep("block_out", x + self.mlp(h, keep))

    @property
    def is_dense(self) -> bool:
        """True if attention and feed-forward block are the dense ones of this module."""
        return type(self._modules.get("self_attn")) is Attention and type(self.mlp) is MLP


class Attention(nn.Module):
    """Project, rotate, cache, mix the values of the context, project back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """Build the modules of one layer."""
        super().__init__()
        hidden, q_width, kv_width = config.hidden_size, config.q_width, config.kv_width
        self.layer, self.head_dim = layer, config.head_dim
        self.q_proj: Any = nn.Linear(hidden, q_width, bias=config.qkv_bias)
        self.k_proj: Any = nn.Linear(hidden, kv_width, bias=config.qkv_bias)
        self.v_proj: Any = nn.Linear(hidden, kv_width, bias=config.qkv_bias)
        self.o_proj: Any = nn.Linear(q_width, hidden, bias=config.o_bias)
        self.q_norm: Any = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm: Any = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.rotate: Any = rotate_and_cache
        self.attend: Any = attention

    def forward(self, h: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the array that attention adds to the residual stream."""
        q = keep("q_proj", self.q_proj(h)).unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads, head_dim)
        k = keep("k_proj", self.k_proj(h)).unflatten(-1, (-1, self.head_dim))  # (batch, seq, kv_heads, head_dim)
        v = keep("v_proj", self.v_proj(h)).unflatten(-1, (-1, self.head_dim))  # (batch, seq, kv_heads, head_dim)
        if self.q_norm is not None:
            q, k = keep("q_norm", self.q_norm(q)), keep("k_norm", self.k_norm(k))
        q, keys, values = self.rotate(q, k, v, self.layer, place, cache, keep)
        context = keep("attn_context", self.attend(q, keys, values, place.visible, keep).flatten(-2))
        return keep("attn_out", self.o_proj(context))


class MLP(nn.Module):
    """SwiGLU feed-forward block: gate and up projections, then the down projection."""

    def __init__(self, hidden: int, inter: int) -> None:
        """Build the modules."""
        super().__init__()
        self.gate_proj: Any = nn.Linear(hidden, inter, bias=False)
        self.up_proj: Any = nn.Linear(hidden, inter, bias=False)
        self.down_proj: Any = nn.Linear(inter, hidden, bias=False)
        self.act: Any = swiglu

    def forward(self, h: Hidden, keep: Keep) -> Hidden:
        """Compute the array that the feed-forward part adds to the residual stream."""
        gate, up = keep("ffn_gate", self.gate_proj(h)), keep("ffn_up", self.up_proj(h))
        return keep("ffn_out", self.down_proj(keep("ffn_act", self.act(gate, up))))


class RMSNorm(nn.Module):
    """RMSNorm with a gain; see `rms_norm`."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with a gain of ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, eps=self.eps)


def widened(x: Tensor) -> Tensor:
    """Cast to at least float32, the dtype of sums and rotations."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], *, eps: float
) -> Float[Tensor, "*rows width"]:
    """Compute x / sqrt(mean(x * x) + eps) * weight, rounded once; transformers also rounds before the gain."""
    x_wide = widened(x)
    return (x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope(x: Heads, cos: Float[Tensor, "batch seq half"], sin: Float[Tensor, "batch seq half"]) -> Heads:
    """Rotate the pairs (j, j + half) of every head by the angle of the token's position; later channels stay."""
    half = cos.shape[-1]
    first, second, unrotated = widened(x).tensor_split((half, 2 * half), dim=-1)  # (batch, seq, heads, half) twice
    cos, sin = cos[:, :, None], sin[:, :, None]  # (batch, seq, 1, half)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, unrotated), dim=-1).to(x.dtype)


def rotate_and_cache(
    q: Heads, k: Heads, v: Heads, layer: int, place: PassPlacement, cache: Cache, keep: Keep
) -> tuple[Heads, Context, Context]:
    """Rotate queries and keys, write keys and values to the cache, return queries and the whole context."""
    q, k = keep("q_rope", rope(q, place.cos, place.sin)), keep("k_rope", rope(k, place.cos, place.sin))
    keys, values = cache.append(layer, k, v, place)
    return q, keep("k_cache", keys), keep("v_cache", values)


def attention(q: Heads, keys: Context, values: Context, visible: Visible, keep: Keep) -> Heads:
    """Compute softmax(q k^T / sqrt(head_dim)) v; query head h uses key and value head h // group_size."""
    batch, seq, _, head_dim = q.shape
    kv_heads, ctx = keys.shape[1:3]
    grouped = q.view(batch, seq, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # (batch, kv_heads, group, seq, hd)
    scores = (widened(grouped) @ widened(keys)[:, :, None].mT).div_(math.sqrt(head_dim))
    mask = visible if visible is not None else torch.ones(seq, ctx, dtype=torch.bool, device=q.device).tril(ctx - seq)
    scores = scores.flatten(1, 2).masked_fill_(~mask, -math.inf)  # (batch, heads, seq, ctx)
    probs = keep("attn_probs", keep("attn_scores", scores).softmax(-1)).unflatten(1, (kv_heads, -1))
    context = (probs @ widened(values)[:, :, None]).flatten(1, 2).to(q.dtype)  # (batch, heads, seq, head_dim)
    return context.transpose(1, 2)


def swiglu(gate: Float[Tensor, "*rows inter"], up: Float[Tensor, "*rows inter"]) -> Float[Tensor, "*rows inter"]:
    """Compute gate / (1 + exp(-gate)) * up, rounded once."""
    return (silu(widened(gate)) * widened(up)).to(gate.dtype)
