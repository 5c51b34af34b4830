"""Mistakes of converters: a table of what each changes in a right conversion, and the tensors and keys that differ.

A mistake of a rule changes all layers. A mistake in one place changes the first layer that has the tensor; `layer` and
`tensor` name another place.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from builders.converter import VALUE_HEADS, Plan, SourceConfig, interleave, minus_exp, tile_value_heads, transform

Change = Callable[[Plan, Sequence[str]], None]  # changes the tensors and metadata keys of these names in a plan
_NORMAL, _CONTROL = 1, 3  # token types
_NORMS = tuple(f"{name}_norm.weight" for name in ("attn", "ffn", "post_attention", "attn_q", "attn_k"))
_ALL_NORMS = (*_NORMS, "output_norm.weight")
_Q, _K, _V = (tuple(f"attn_{part}.{end}" for end in ("weight", "bias")) for part in "qkv")
_EXPERTS = tuple(f"ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
_UP, _DOWN = (tuple(f"ffn_{part}{suffix}.weight" for suffix in ("", "_exps")) for part in ("up", "down"))
_MIXER_OUTPUT = ("ssm_out.weight", "attn_output.weight")
_LINEAR = (
    *("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "attn_qkv.weight", "attn_gate.weight"),
    *("ssm_out.weight", "ffn_gate.weight", *_UP, "ffn_down.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight"),
)
_LAYER = (*_Q, *_K, *_V, *_NORMS, *_LINEAR, *VALUE_HEADS, "ssm_norm.weight", "ffn_gate_inp.weight")
_TOKENIZER = "tokenizer.ggml."
_CUT_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """Mistake of a converter.

    Attributes:
        effect: Description of the wrong file.
        change: Function that makes the mistake in a plan.
        kinds: Names of tensors, without `blk.N.` for those of layers.
        additional: Tensors of the wrong file that the right file lacks.
        scope: Layers that have the mistake: all, the first with such a tensor, or the first two.
        keys: Metadata keys that change; `{arch}` stands for the architecture.
        condition: Further condition for configurations that can have the mistake.
    """

    effect: str
    change: Change
    kinds: tuple[str, ...] = ()
    additional: tuple[str, ...] = ()
    scope: Literal["all", "first", "two"] = "all"
    keys: tuple[str, ...] = ()
    condition: Callable[[SourceConfig], bool] = lambda config: True

    def applies(self, config: SourceConfig) -> bool:
        """Tell if a conversion of this configuration can make the mistake."""
        needs_vocabulary = any(key.startswith("tokenizer.") for key in self.keys)
        has_tensors = bool(self.tensors(config)) or not self.kinds
        return has_tensors and (config.has_vocabulary or not needs_vocabulary) and self.condition(config)

    def tensors(self, config: SourceConfig, *, layer: int | None = None, tensor: str | None = None) -> list[str]:
        """List the tensors that differ from the right file's, are missing or additional.

        Args:
            config: Hyperparameters of the source.
            layer: The only layer with the mistake; None for the layers of `scope`.
            tensor: The only tensor with the mistake; None for all of `kinds`.
        """
        if tensor is not None:
            return [tensor]
        layers = range(config.n_layers) if layer is None else [layer]
        by_layer = [[f"blk.{n}.{kind}" for kind in config.weights_of_layer(n) if kind in self.kinds] for n in layers]
        by_layer = [names for names in by_layer if names]
        if self.scope == "first":
            by_layer = [names[:1] for names in by_layer[:1]]
        elif self.scope == "two":
            by_layer = by_layer[:2]
        outside = [name for name in config.weights_outside_layers() if name in self.kinds]
        return [*chain(*by_layer), *outside, *self.additional]

    def metadata(self, config: SourceConfig) -> list[str]:
        """List the metadata keys whose values differ from the right file's."""
        keys = [key.replace("{arch}.", config.prefix) for key in self.keys]
        return [key for key in keys if config.writes_vocab_size or not key.endswith(".vocab_size")]


def inject(plan: Plan, name: str, **where: Any) -> None:
    """Make the mistake `name` of `MISTAKES` in a plan; `where` is passed to `Mistake.tensors`.

    Raises:
        ValueError: The mistake does not apply to the configuration.
    """
    mistake, config = MISTAKES[name], plan.config
    if not mistake.applies(config):
        raise ValueError(f"{name}: expected a configuration that can have the mistake, got {config.family}")
    mistake.change(plan, [*mistake.tensors(config, **where), *mistake.metadata(config)])


def _each(function: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Change each tensor by itself."""

    def change(plan: Plan, names: Sequence[str]) -> None:
        for name in names:
            plan.tensors[name] = np.ascontiguousarray(function(plan.tensors[name]), np.float32)

    return change


def _element(value: float) -> Change:
    """Replace the middle element of each tensor."""

    def replace_middle(array: np.ndarray) -> np.ndarray:
        values = array.copy()
        values.flat[values.size // 2] = value
        return values

    return _each(replace_middle)


def _exchange(first: str, second: str) -> Change:
    """Exchange the tensors of two kinds in each layer."""

    def change(plan: Plan, names: Sequence[str]) -> None:
        for name in names:
            if first in name:
                partner = name.replace(first, second)
                plan.tensors[name], plan.tensors[partner] = plan.tensors[partner], plan.tensors[name]

    return change


def _set(function: Callable[[Any, Plan], Any]) -> Change:
    """Change the values of metadata keys."""

    def change(plan: Plan, names: Sequence[str]) -> None:
        for name in names:
            plan.metadata[name] = function(plan.metadata[name], plan)

    return change


def _drop(plan: Plan, names: Sequence[str]) -> None:
    for name in names:
        del plan.tensors[name]


def _leave_untransformed(plan: Plan, names: Sequence[str]) -> None:
    plan.tensors |= {name: plan.untransformed[name] for name in names}


def _interleave_again(plan: Plan, names: Sequence[str]) -> None:
    for name in names:
        n_heads = plan.config.n_heads if ".attn_q." in name else plan.config.n_kv_heads
        plan.tensors[name] = interleave(plan.tensors[name], n_heads)


def _interleave_with_query_heads(plan: Plan, names: Sequence[str]) -> None:
    plan.tensors |= {name: interleave(plan.untransformed[name], plan.config.n_heads) for name in names}


def _leave_value_heads(plan: Plan, names: Sequence[str]) -> None:
    for name in names:
        array = plan.untransformed[name]
        plan.tensors[name] = minus_exp(array) if name.endswith("ssm_a") else array


def _leave_out_exp(plan: Plan, names: Sequence[str]) -> None:
    plan.tensors |= {name: tile_value_heads(name, plan.untransformed[name], plan.config) for name in names}


def _take_next_layer(plan: Plan, names: Sequence[str]) -> None:
    """Give each tensor the values of the next layer that has such a tensor; after the last, of the first layer."""
    for name in names:
        layers = [layer for layer in range(plan.config.n_layers) if _in_layer(name, layer) in plan.tensors]
        layer = next((layer for layer in layers if layer > _layer_of(name)), layers[0])
        plan.tensors[name] = plan.tensors[_in_layer(name, layer)].copy()


def _exchange_layers(plan: Plan, names: Sequence[str]) -> None:
    """Exchange the two halves of `names`, each the tensors of a layer."""
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    arrays = [plan.tensors[name] for name in (*second, *first)]
    plan.tensors |= dict(zip((*first, *second), arrays, strict=True))


def _exchange_k_and_v(plan: Plan, names: Sequence[str]) -> None:
    """Convert each v projection as if it were k, and each k projection as if it were v."""
    for name in names:
        partner = name.replace("attn_k", "attn_v") if "attn_k" in name else name.replace("attn_v", "attn_k")
        plan.tensors[name] = transform(name, plan.untransformed[partner], plan.config)


def _take_k_bias(plan: Plan, names: Sequence[str]) -> None:
    plan.tensors |= {name: plan.untransformed[name.replace("attn_v", "attn_k")] for name in names}


def _roll_query_heads(plan: Plan, names: Sequence[str]) -> None:
    for name in names:
        array = plan.tensors[name]
        plan.tensors[name] = np.roll(array, len(array) // plan.config.n_heads, axis=0)


def _write_reversed_head(plan: Plan, names: Sequence[str]) -> None:
    plan.tensors |= {name: plan.tensors["token_embd.weight"][::-1] for name in names}


def _copy_embedding(plan: Plan, names: Sequence[str]) -> None:
    plan.tensors |= {name: plan.tensors["token_embd.weight"] for name in names}


def _exchange_rows(array: np.ndarray) -> np.ndarray:
    order = np.arange(len(array))
    order[[17, 42]] = 42, 17
    return array[order]


def _cut_vocabulary(plan: Plan, names: Sequence[str]) -> None:
    for name in names:
        if name in plan.tensors:
            plan.tensors[name] = plan.tensors[name][:-_CUT_ROWS]
        elif name.endswith("vocab_size"):
            plan.metadata[name] -= _CUT_ROWS
        else:
            plan.metadata[name] = plan.metadata[name][:-_CUT_ROWS]


def _repeat_first_half(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array[: len(array) // 2]] * 2)


def _round_to_fp8(array: np.ndarray) -> np.ndarray:
    """Round to E4M3 with a scale for the whole tensor: 3 bits after the first, exponents from -6."""
    scale = np.abs(array).max() / np.float32(448)
    exponent = np.frexp(array / scale)[1] - 1
    step = np.exp2(np.maximum(exponent, -6) - 3)
    return (np.rint(array / scale / step) * step * scale).astype(np.float32)


def _preceding_control_token(token_id: int, plan: Plan) -> int:
    types = plan.metadata[_TOKENIZER + "token_type"]
    return max(other for other in range(token_id) if types[other] == _CONTROL)


def _other_end_marker(template: str, plan: Plan) -> str:
    end = plan.metadata[_TOKENIZER + "tokens"][plan.metadata[_TOKENIZER + "eos_token_id"]]
    return template.replace(end, "<|end|>")


def _exchange_items(first: int, second: int) -> Change:
    def exchange(items: list[Any], _plan: Plan) -> list[Any]:
        items = [*items]
        items[first], items[second] = items[second], items[first]
        return items

    return _set(exchange)


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def _in_layer(name: str, layer: int) -> str:
    return re.sub(r"^blk\.\d+\.", f"blk.{layer}.", name)


def _is_partial(config: SourceConfig) -> bool:
    return config.rope.get("partial_rotary_factor", 1) != 1


def _has_grouped_value_heads(config: SourceConfig) -> bool:
    n_keys, n_values, _ = config.heads_of_delta_net
    return n_keys != n_values


ROWS = {  # order of the rows of q and k
    "q and k not permuted": Mistake(
        effect="rows of q and k in the order of the folder", kinds=_Q + _K, change=_leave_untransformed,
        condition=lambda config: config.is_interleaved,
    ),
    "q and k permuted twice": Mistake(
        effect="rows of q and k permuted twice", kinds=_Q + _K, change=_interleave_again,
        condition=lambda config: config.is_interleaved,
    ),
    "q and k permuted without need": Mistake(
        effect="rows of q and k permuted, although llama.cpp rotates halves of a head", kinds=_Q + _K,
        change=_interleave_again, condition=lambda config: not config.is_interleaved,
    ),
    "k permuted with the heads of q": Mistake(
        effect="rows of k permuted as if k had as many heads as q", kinds=_K, change=_interleave_with_query_heads,
        condition=lambda config: config.is_interleaved and config.n_heads != config.n_kv_heads,
    ),
    "heads of q in another order": Mistake(
        effect="each head of q in the place of the next head", kinds=_Q, change=_roll_query_heads,
    ),
    "k and v exchanged": Mistake(effect="k under the name of v", kinds=_K + _V, change=_exchange_k_and_v),
}  # fmt: skip
VALUES = {  # changes of values that a format requires
    "norms without the 1": Mistake(
        effect="norms have w, llama.cpp needs 1 + w", kinds=_ALL_NORMS, change=_leave_untransformed,
        condition=lambda config: config.has_norm_offset,
    ),
    "norms with the 1 twice": Mistake(
        effect="norms have 2 + w", kinds=_ALL_NORMS, change=_each(lambda array: array + 1),
        condition=lambda config: config.has_norm_offset,
    ),
    "norms with the 1 without need": Mistake(
        effect="norms have 1 + w, llama.cpp needs w", kinds=_ALL_NORMS, change=_each(lambda array: array + 1),
        condition=lambda config: not config.has_norm_offset,
    ),
    "gated norm with the 1": Mistake(
        effect="the norm of the delta net has 1 + w, llama.cpp needs w", kinds=("ssm_norm.weight",),
        change=_each(lambda array: array + 1),
    ),
    "decay without exp": Mistake(
        effect="ssm_a has A_log, llama.cpp needs -exp(A_log)", kinds=("ssm_a",), change=_leave_out_exp,
    ),
    "convolution reversed": Mistake(
        effect="the last tap of the convolution is the first", kinds=("ssm_conv1d.weight",),
        change=_each(lambda array: array[:, ::-1]),
    ),
    "value heads not reordered": Mistake(
        effect="value heads grouped by key head", kinds=VALUE_HEADS, change=_leave_value_heads,
        condition=_has_grouped_value_heads,
    ),
    "columns of the delta net's output not reordered": Mistake(
        effect="columns of the output projection grouped by key head", kinds=("ssm_out.weight",),
        change=_leave_value_heads, condition=_has_grouped_value_heads,
    ),
    "rounded to FP8 first": Mistake(
        effect="linear weights have only values of E4M3", kinds=_LINEAR, change=_each(_round_to_fp8),
    ),
}  # fmt: skip
PLACES = {  # tensors under wrong names
    "gate and up exchanged": Mistake(
        effect="gate under the name of up", kinds=("ffn_gate.weight", "ffn_up.weight"),
        change=_exchange("ffn_gate.", "ffn_up."),
    ),
    "gate and up of the experts exchanged": Mistake(
        effect="gate under the name of up", kinds=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        change=_exchange("ffn_gate_exps.", "ffn_up_exps."),
    ),
    "experts in another order": Mistake(
        effect="each expert in the place of the next expert", kinds=_EXPERTS,
        change=_each(lambda array: np.roll(array, 1, axis=0)),
    ),
    "mixer output of another layer": Mistake(
        effect="the output projection of the next layer", kinds=_MIXER_OUTPUT, scope="first", change=_take_next_layer,
    ),
    "down projection of another layer": Mistake(
        effect="the down projection of the next layer", kinds=_DOWN, scope="first", change=_take_next_layer,
    ),
    "router of another layer": Mistake(
        effect="the router of the next layer", kinds=("ffn_gate_inp.weight",), scope="first", change=_take_next_layer,
    ),
    "time step bias of another layer": Mistake(
        effect="dt_bias of the next layer", kinds=("ssm_dt.bias",), scope="first", change=_take_next_layer,
    ),
    "two layers exchanged": Mistake(
        effect="all tensors of the first two layers exchanged", kinds=_LAYER, scope="two", change=_exchange_layers,
    ),
    "v bias equal to the k bias": Mistake(
        effect="the bias of k under the name of v", kinds=("attn_v.bias",), scope="first", change=_take_k_bias,
    ),
    "head of its own though tied": Mistake(
        effect="an output matrix with reversed rows, the source uses the embedding", additional=("output.weight",),
        change=_write_reversed_head, condition=lambda config: config.is_tied,
    ),
    "head equal to the embedding": Mistake(
        effect="the embedding as output matrix, the source has another", kinds=("output.weight",),
        change=_copy_embedding,
    ),
    "head left out": Mistake(
        effect="no output matrix, so that engines use the embedding", kinds=("output.weight",), change=_drop,
    ),
    "embedding rows exchanged": Mistake(
        effect="embeddings of two tokens exchanged", kinds=("token_embd.weight",), change=_each(_exchange_rows),
    ),
    "vocabulary cut": Mistake(
        effect="the last 64 tokens are missing, the end token among them", change=_cut_vocabulary,
        kinds=("token_embd.weight", "output.weight"),
        keys=("{arch}.vocab_size", _TOKENIZER + "tokens", _TOKENIZER + "token_type"),
    ),
}  # fmt: skip
DAMAGE = {  # wrong numbers in one tensor
    "zeroed matrix": Mistake(effect="zeros", kinds=_UP, scope="first", change=_each(np.zeros_like)),
    "biases of zeros": Mistake(
        effect="biases of zeros", kinds=("attn_q.bias", "attn_k.bias", "attn_v.bias"), change=_each(np.zeros_like),
    ),
    "transposed matrix": Mistake(
        effect="rows as columns", kinds=_MIXER_OUTPUT, scope="first", change=_each(np.transpose),
        condition=lambda config: config.n_heads * config.head_dim == config.values["hidden_size"],
    ),
    "scaled by 2 %": Mistake(
        effect="a matrix times 1.02", kinds=_DOWN, scope="first", change=_each(lambda array: array * np.float32(1.02)),
    ),
    "scaled by the square root of 2": Mistake(
        effect="a matrix times 1.414", kinds=_DOWN, scope="first",
        change=_each(lambda array: array * np.float32(np.sqrt(2))),
    ),
    "shard written twice": Mistake(
        effect="the second half of the rows equal to the first", kinds=_MIXER_OUTPUT, scope="first",
        change=_each(_repeat_first_half),
    ),
    "NaN in a tensor": Mistake(effect="an element is NaN", kinds=_DOWN, scope="first", change=_element(np.nan)),
    "infinity in a tensor": Mistake(
        effect="an element is infinite", kinds=_DOWN, scope="first", change=_element(np.inf)
    ),
    "constant norm": Mistake(
        effect="a norm of ones", kinds=("attn_norm.weight",), scope="first", change=_each(np.ones_like),
    ),
}  # fmt: skip
SETTINGS = {
    "RoPE factors missing": Mistake(
        effect="no rope_freqs.weight, llama.cpp has no other form of this scaling", kinds=("rope_freqs.weight",),
        change=_drop,
    ),
    "another RoPE base": Mistake(
        effect="RoPE base 10000", keys=("{arch}.rope.freq_base",), change=_set(lambda value, plan: 1e4),
    ),
    "RoPE over the whole head": Mistake(
        effect="all elements of a head are rotated", keys=("{arch}.rope.dimension_count",), condition=_is_partial,
        change=_set(lambda value, plan: plan.config.head_dim),
    ),
    "another epsilon": Mistake(
        effect="1e-5 in place of 1e-6, or 1e-6 in place of 1e-5", keys=("{arch}.attention.layer_norm_rms_epsilon",),
        change=_set(lambda value, plan: 1e-5 if value == 1e-6 else 1e-6),
    ),
    "another number of key heads": Mistake(
        effect="as many key heads as query heads", keys=("{arch}.attention.head_count_kv",),
        change=_set(lambda value, plan: plan.config.n_heads),
        condition=lambda config: config.n_heads != config.n_kv_heads,
    ),
    "another number of experts": Mistake(
        effect="one more expert for each token", keys=("{arch}.expert_used_count",),
        change=_set(lambda value, plan: value + 1),
        condition=lambda config: "num_local_experts" in config.values,
    ),
}  # fmt: skip
TOKENIZER = {
    "another end token": Mistake(
        effect="the control token before the right end token", keys=(_TOKENIZER + "eos_token_id",),
        change=_set(_preceding_control_token),
    ),
    "begin token reversed": Mistake(
        effect="the begin token is added if the source adds none, and not added if the source adds it",
        keys=(_TOKENIZER + "add_bos_token",), change=_set(lambda value, plan: not value),
    ),
    "another pre-tokenizer": Mistake(
        effect="groups of three digits in place of single digits, or single digits in place of groups",
        keys=(_TOKENIZER + "pre",),
        change=_set(lambda value, plan: "qwen2" if value == "llama-bpe" else "llama-bpe"),
    ),
    "control tokens as text": Mistake(
        effect="control tokens have the type of normal tokens", keys=(_TOKENIZER + "token_type",),
        change=_set(lambda value, plan: [_NORMAL if kind == _CONTROL else kind for kind in value]),
    ),
    "two tokens exchanged": Mistake(
        effect="the texts of two ids exchanged", keys=(_TOKENIZER + "tokens",), change=_exchange_items(70, 75),
    ),
    "two merges exchanged": Mistake(
        effect="the first merge after the second", keys=(_TOKENIZER + "merges",), change=_exchange_items(0, 1),
    ),
    "another marker in the chat template": Mistake(
        effect="<|end|> ends a turn, in place of the end token", keys=("tokenizer.chat_template",),
        change=_set(_other_end_marker),
    ),
}  # fmt: skip
MISTAKES: dict[str, Mistake] = ROWS | VALUES | PLACES | DAMAGE | SETTINGS | TOKENIZER
