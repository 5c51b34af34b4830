"""Weights of a model, their names in each format, and the row order of q and k in Llama GGUF files.

Canonical names follow Hugging Face without prefixes: `layers.3.q_proj`. Shapes are always (out, in).

For the llama family, llama.cpp rotates neighbouring pairs of a head; Hugging Face rotates the first half against the
second. Its converter therefore reorders the rows of q and k, per head, when it writes a Llama GGUF file:

    gguf[2 * j] = hf[j]        gguf[2 * j + 1] = hf[j + half]        j = 0 .. half - 1

Files of Mistral, Ministral 3 and SmolLM3 have this order, too; Qwen files have the Hugging Face order. Only this module
undoes the order, when a weight is read; `tensor_storage` has the other differences.

Source: llama.cpp gguf-py/gguf/tensor_mapping.py, conversion of LlamaModel (`permute`); transformers modeling_llama.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.family import Family
from llorch.families.table import FAMILIES
from llorch.files.tensor_storage import AS_IS, Layout, fused_layout, in_gguf


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Row of the weight table: names in both formats, axes, and the traits of layers that have the weight."""

    name: str
    gguf: str
    huggingface: str
    axes: tuple[str, ...]  # attributes of ModelConfig, or "one" for the length 1
    needs: tuple[str, ...] = ()  # traits that the layer, or the model, must have; see `ModelConfig.traits`
    heads: str | None = None  # number of heads whose rows are reordered in Llama GGUF files; attribute of ModelConfig
    is_matrix: bool = True  # has two or three axes, is multiplied and quantised


MODEL_WEIGHTS = (
    WeightRow("embed_tokens", "token_embd.weight", "model.embed_tokens.weight", ("vocab_size", "hidden_size")),
    WeightRow("final_norm", "output_norm.weight", "model.norm.weight", ("hidden_size",)),
    WeightRow("lm_head", "output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), ("untied",)),
)

_QKV_BIAS, _O_BIAS, _QK_NORM = ("qkv_bias",), ("o_bias",), ("qk_norm",)
_ATTENTION, _DELTA_NET, _DENSE, _EXPERTS = ("attention",), ("delta_net",), ("dense",), ("experts",)
_SIZE, _SHARED = "experts.expert_size", "experts.shared_size"
_VALUES, _CONV, _V_HEADS = "delta_net.value_width", "delta_net.conv_width", "delta_net.n_value_heads"
_STACK = ("experts.n_experts",)  # first axis of a tensor of all experts
_PARTS = {"gate": (_SIZE, "hidden_size"), "up": (_SIZE, "hidden_size"), "down": ("hidden_size", _SIZE)}

# Names without their prefixes `layers.{i}.`, `blk.{i}.` and `model.layers.{i}.`; `{e}` is the number of an expert, and
# the family defines `{mlp}`, `{router}` and `{ffn_norm}`.
LAYER_WEIGHTS = (
    WeightRow("attn_norm", "attn_norm.weight", "input_layernorm.weight", ("hidden_size",)),
    WeightRow("q_proj", "attn_q.weight", "self_attn.q_proj.weight", ("q_rows", "hidden_size"), _ATTENTION, "n_heads"),
    WeightRow("q_bias", "attn_q.bias", "self_attn.q_proj.bias", ("q_rows",), _QKV_BIAS, "n_heads"),
    WeightRow(
        "k_proj", "attn_k.weight", "self_attn.k_proj.weight", ("kv_width", "hidden_size"), _ATTENTION, "n_kv_heads"
    ),
    WeightRow("k_bias", "attn_k.bias", "self_attn.k_proj.bias", ("kv_width",), _QKV_BIAS, "n_kv_heads"),
    WeightRow("v_proj", "attn_v.weight", "self_attn.v_proj.weight", ("kv_width", "hidden_size"), _ATTENTION),
    WeightRow("v_bias", "attn_v.bias", "self_attn.v_proj.bias", ("kv_width",), _QKV_BIAS),
    WeightRow("o_proj", "attn_output.weight", "self_attn.o_proj.weight", ("hidden_size", "q_width"), _ATTENTION),
    WeightRow("o_bias", "attn_output.bias", "self_attn.o_proj.bias", ("hidden_size",), _O_BIAS),
    WeightRow("q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight", ("head_dim",), _QK_NORM),
    WeightRow("k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight", ("head_dim",), _QK_NORM),
    WeightRow("in_qkv", "attn_qkv.weight", "linear_attn.in_proj_qkv.weight", (_CONV, "hidden_size"), _DELTA_NET),
    WeightRow("in_z", "attn_gate.weight", "linear_attn.in_proj_z.weight", (_VALUES, "hidden_size"), _DELTA_NET),
    WeightRow("in_b", "ssm_beta.weight", "linear_attn.in_proj_b.weight", (_V_HEADS, "hidden_size"), _DELTA_NET),
    WeightRow("in_a", "ssm_alpha.weight", "linear_attn.in_proj_a.weight", (_V_HEADS, "hidden_size"), _DELTA_NET),
    WeightRow(
        "conv", "ssm_conv1d.weight", "linear_attn.conv1d.weight", (_CONV, "delta_net.conv_kernel"), _DELTA_NET,
        is_matrix=False,
    ),
    WeightRow("dt_bias", "ssm_dt.bias", "linear_attn.dt_bias", (_V_HEADS,), _DELTA_NET),
    WeightRow("decay", "ssm_a", "linear_attn.A_log", (_V_HEADS,), _DELTA_NET),
    WeightRow("delta_norm", "ssm_norm.weight", "linear_attn.norm.weight", ("delta_net.value_head_dim",), _DELTA_NET),
    WeightRow("out_proj", "ssm_out.weight", "linear_attn.out_proj.weight", ("hidden_size", _VALUES), _DELTA_NET),
    WeightRow("ffn_norm", "{ffn_norm}.weight", "post_attention_layernorm.weight", ("hidden_size",)),
    WeightRow("gate_proj", "ffn_gate.weight", "{mlp}.gate_proj.weight", ("intermediate_size", "hidden_size"), _DENSE),
    WeightRow("up_proj", "ffn_up.weight", "{mlp}.up_proj.weight", ("intermediate_size", "hidden_size"), _DENSE),
    WeightRow("down_proj", "ffn_down.weight", "{mlp}.down_proj.weight", ("hidden_size", "intermediate_size"), _DENSE),
    WeightRow("router", "ffn_gate_inp.weight", "{mlp}.{router}.weight", (*_STACK, "hidden_size"), _EXPERTS),
    *(
        WeightRow(
            f"experts_{part}_proj", f"ffn_{part}_exps.weight", f"{{mlp}}.experts.{{e}}.{part}_proj.weight",
            (*_STACK, *axes), _EXPERTS,
        )
        for part, axes in _PARTS.items()
    ),
    WeightRow(
        "shared_gate", "ffn_gate_inp_shexp.weight", "{mlp}.shared_expert_gate.weight", ("one", "hidden_size"),
        ("shared_gate",),
    ),
    *(
        WeightRow(
            f"shared_{part}_proj", f"ffn_{part}_shexp.weight", f"{{mlp}}.shared_expert.{part}_proj.weight",
            tuple(_SHARED if axis == _SIZE else axis for axis in axes), ("shared",),
        )
        for part, axes in _PARTS.items()
    ),
)  # fmt: skip

_MULTIMODAL_PREFIXES = sorted(
    {family.layout.multimodal_prefixes for family in FAMILIES.values() if family.multimodal_type}
)


@dataclass(frozen=True, slots=True)
class Weight:
    """Weight of one model: names, shape and layout in each format."""

    name: str
    gguf: str
    huggingface: str
    shape: tuple[int, ...]
    interleaved_heads: int  # heads with interleaved rows in GGUF; 0: rows as in Hugging Face
    is_matrix: bool = True  # multiplied and quantised, alone or in a stack of experts
    in_gguf: Layout = AS_IS
    in_huggingface: Layout = AS_IS

    @property
    def stays_f32(self) -> bool:
        """True if a GGUF file stores the weight in F32, for any type of matrices."""
        return not self.is_matrix or self.name.rpartition(".")[2] in ("router", "shared_gate")


def inventory(config: ModelConfig) -> dict[str, Weight]:
    """Return every weight of a model by canonical name, within a layer in the order of the forward pass."""
    family, weights = FAMILIES[config.family], {}
    name_parts = family.layout.all_names
    layers: list[int | None] = [None, *range(config.n_layers)]
    for layer in layers:
        traits = config.traits(layer)
        prefix, gguf_prefix, huggingface_prefix = ("", "", "") if layer is None else layer_prefixes(layer)
        for row in MODEL_WEIGHTS if layer is None else LAYER_WEIGHTS:
            if not traits.issuperset(row.needs):
                continue
            weight = Weight(
                prefix + row.name,
                gguf_prefix + row.gguf.format(**name_parts),
                huggingface_prefix + row.huggingface.format(e="{e}", **name_parts),
                tuple(1 if axis == "one" else attrgetter(axis)(config) for axis in row.axes),
                getattr(config, row.heads) if row.heads and family.layout.interleaved_rope == "gguf" else 0,
                row.is_matrix and len(row.axes) > 1,
            )
            weights[weight.name] = _with_layouts(weight, row.name, config, family)
    return weights


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model."""
    return sum(math.prod(weight.shape) for weight in inventory(config).values())


def layer_prefixes(layer: int) -> tuple[str, str, str]:
    """Return the prefixes of a layer's weight names: in llorch, in GGUF files, in Hugging Face folders."""
    return f"layers.{layer}.", f"blk.{layer}.", f"model.layers.{layer}."


def to_multimodal(path: str, multimodal_prefixes: tuple[str, str]) -> str:
    """Return the path of a text module inside a multimodal model; `multimodal_prefixes` comes from its family."""
    text_prefix, multimodal_prefix = multimodal_prefixes
    return multimodal_prefix + path.removeprefix(text_prefix) if path.startswith(text_prefix) else path


def form_of(path: str) -> tuple[str, str]:
    """Return the (text, multimodal) prefixes of a path in the text part of a multimodal model; else empty strings."""
    return next((form for form in _MULTIMODAL_PREFIXES if path.startswith(form[1])), ("", ""))


def to_text_only(path: str) -> str:
    """Return the path in the text model of a module or tensor of a multimodal model; other paths do not change."""
    text_prefix, multimodal_prefix = form_of(path)
    return text_prefix + path.removeprefix(multimodal_prefix)


def _with_layouts(weight: Weight, short: str, config: ModelConfig, family: Family) -> Weight:
    """Set the layouts of a weight that is not one tensor in Hugging Face's order."""
    net = config.delta_net
    if family.layout.norm_weight_offset and short.endswith("norm") and short != "delta_norm":
        return replace(weight, in_huggingface=Layout(form="less_one"))
    if family.layout.transposed_experts == "modules" and short.startswith("experts_"):
        return _fuse(weight, short, is_transposed=True)
    if net is None:
        return weight
    tiled = family.delta_net == "separate"  # Qwen3.5: value heads in the order of `TiledValues` in GGUF files
    weight = replace(weight, in_gguf=in_gguf(short, net, config.hidden_size, tiled=tiled))
    match short:
        case "conv":
            channels, taps = weight.shape
            return replace(weight, in_huggingface=Layout(shape=(channels, 1, taps)))
        case "decay":
            return replace(weight, in_huggingface=Layout(form="logarithm"))
        case "in_qkv" | "in_z" | "in_b" | "in_a" if not tiled:
            pair = "qkvz" if short in ("in_qkv", "in_z") else "ba"
            prefix = weight.huggingface.rpartition("linear_attn.")[0]
            name = f"{prefix}linear_attn.in_proj_{pair}.weight"
            gguf = weight.gguf if pair == "qkvz" else weight.gguf.rpartition("ssm_")[0] + "ssm_ba.weight"
            return replace(
                weight, huggingface=name, gguf=gguf, in_huggingface=fused_layout(short, net, weight.shape[1])
            )
        case _:
            return weight


def _fuse(weight: Weight, short: str, *, is_transposed: bool) -> Weight:
    """Set the name and layout of a weight in a tensor with all experts of a layer."""
    n_experts, n_out, n_in = weight.shape
    prefix = weight.huggingface.partition("experts.")[0] + "experts."
    if short == "experts_down_proj":
        shape = (n_experts, n_in, n_out) if is_transposed else weight.shape
        layout = Layout(shape=shape, is_transposed=is_transposed)
        return replace(weight, huggingface=f"{prefix}down_proj", in_huggingface=layout)
    shape = (n_experts, n_in, 2 * n_out) if is_transposed else (n_experts, 2 * n_out, n_in)
    layout = Layout(shape=shape, half=0 if short == "experts_gate_proj" else 1, is_transposed=is_transposed)
    return replace(weight, huggingface=f"{prefix}gate_up_proj", in_huggingface=layout)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor to write, and the weights in it; `expert` is the number if each expert has its own tensor."""

    name: str
    shape: tuple[int, ...]
    weights: tuple[Weight, ...]
    expert: int | None = None


def written_family(config: ModelConfig) -> str:
    """Return the family to write: for a text part without its own class, the family with the same computation."""
    return FAMILIES[config.family].written_as or config.family


def gguf_tensors(config: ModelConfig) -> list[Tensor]:
    """Return the tensors of a GGUF file."""
    return _join_tensors((weight.gguf, weight.in_gguf, weight) for weight in inventory(config).values())


def huggingface_tensors(config: ModelConfig) -> list[Tensor]:
    """Return the tensors of a text-only Hugging Face folder, with experts as transformers writes them."""
    config = replace(config, family=written_family(config))
    tensors = _join_tensors(
        (weight.huggingface, weight.in_huggingface, weight) for weight in inventory(config).values()
    )
    return [expert_tensor for tensor in tensors for expert_tensor in _split_experts(tensor)]


def _join_tensors(rows: Iterable[tuple[str, Layout, Weight]]) -> list[Tensor]:
    """Build tensors from (name, layout, weight); rows with the same name become one tensor."""
    tensors: dict[str, Tensor] = {}
    for name, layout, weight in rows:
        weights = tensors[name].weights if name in tensors else ()
        tensors[name] = Tensor(name, layout.shape or weight.shape, (*weights, weight))
    return [*tensors.values()]


def _split_experts(tensor: Tensor) -> list[Tensor]:
    """Split a tensor into one per expert, if its name has the placeholder `{e}`."""
    if "{e}" not in tensor.name:
        return [tensor]
    n_experts, *shape = tensor.shape
    return [Tensor(tensor.name.format(e=expert), tuple(shape), tensor.weights, expert) for expert in range(n_experts)]


def found_in(names: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Weight]:
    """Return the inventory, adapted to a file, whose tensors `names` maps to their shapes."""
    family = FAMILIES[config.family]
    return {name: _adapt_to_file(weight, names, family) for name, weight in inventory(config).items()}


def _adapt_to_file(weight: Weight, names: Mapping[str, tuple[int, ...]], family: Family) -> Weight:
    """Adapt a weight to the converter of a file: fused experts, or `ssm_in` of the oldest Qwen3-Next files."""
    short = weight.name.rpartition(".")[2]
    if short.startswith("experts_"):
        if not weight.in_huggingface.is_transposed and weight.huggingface.format(e=0) not in names:
            is_transposed = family.layout.transposed_experts == "files" and not _is_out_in(weight, short, names)
            fused = _fuse(weight, short, is_transposed=is_transposed)
            weight = fused if fused.huggingface in names else weight
        fused_name = weight.gguf.replace(f"ffn_{short.split('_')[1]}_exps", "ffn_gate_up_exps")
        if weight.gguf not in names and fused_name in names:
            weight = replace(weight, gguf=fused_name, in_gguf=_fuse(weight, short, is_transposed=False).in_huggingface)
    legacy = weight.gguf.replace(".attn_qkv.", ".ssm_in.").replace(".attn_gate.", ".ssm_in.")
    if short in ("in_qkv", "in_z") and weight.gguf not in names and legacy in names:
        weight = replace(weight, gguf=legacy, in_gguf=weight.in_huggingface)
    return weight


def _is_out_in(weight: Weight, short: str, names: Mapping[str, tuple[int, ...]]) -> bool:
    """Check if both expert tensors are (experts, out, in); one shape alone can be ambiguous, both together not."""
    prefix, (n_experts, n_out, n_in) = weight.huggingface.partition("experts.")[0], weight.shape
    size, hidden = (n_in, n_out) if short == "experts_down_proj" else (n_out, n_in)
    return (
        names.get(f"{prefix}experts.gate_up_proj") == (n_experts, 2 * size, hidden)
        and names.get(f"{prefix}experts.down_proj") == (n_experts, hidden, size)
    )  # fmt: skip


def undo_interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows of q or k, weight or bias, from the pairs of Llama GGUF files to the halves of Hugging Face."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])  # (heads, half, 2, ...)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows of q or k from halves to pairs: element j of a head's first half, then element j of its second."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])  # (heads, 2, half, ...)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def is_plain_name(name: str) -> bool:
    """Check if a name from a file is safe in messages, C strings and paths."""
    return bool(name) and name.isprintable() and not any(part in name for part in ("/", "\\", ".."))
