"""Which weights a model has, what they are called where, and the row order of q and k in Llama GGUF files.

Canonical names follow Hugging Face without the decoration: `layers.3.q_proj`. Shapes are (out, in)
everywhere.

llama.cpp rotates neighbouring pairs of a head for the llama family, Hugging Face rotates the first half
against the second. The converter therefore reorders the rows of q and k, per head, when it writes a Llama
GGUF file:

    gguf[2 * j] = hf[j]        gguf[2 * j + 1] = hf[j + half]        j = 0 .. half - 1

Mistral, Ministral 3 and SmolLM3 are written likewise; Qwen files keep the Hugging Face order. The order is undone on
loading, here and nowhere else; `tensor_storage` has the other differences.

Source: llama.cpp gguf-py/gguf/tensor_mapping.py and conversion of LlamaModel (`permute`); transformers
modeling_llama.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.family import Family
from llorch.families.table import FAMILIES
from llorch.files.tensor_storage import AS_IS, Layout, in_gguf, joined_layout


@dataclass(frozen=True, slots=True)
class WeightRow:
    """One line of the table: a weight, its names in both formats, its axes, and when a layer has it."""

    name: str
    gguf: str
    huggingface: str
    axes: tuple[str, ...]  # attributes of ModelConfig
    needs: tuple[str, ...] = ()  # traits of the layer, or of the model
    heads: str | None = None  # rows in heads, reordered in Llama GGUF files; attribute of ModelConfig
    is_matrix: bool = True  # of two or three axes, multiplied with and quantised


MODEL_WEIGHTS = (
    WeightRow("embed_tokens", "token_embd.weight", "model.embed_tokens.weight", ("vocab_size", "hidden_size")),
    WeightRow("final_norm", "output_norm.weight", "model.norm.weight", ("hidden_size",)),
    WeightRow("lm_head", "output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), ("untied",)),
)

_QKV_BIAS, _O_BIAS, _QK_NORM = ("qkv_bias",), ("o_bias",), ("qk_norm",)
_ATTENTION, _DELTA_NET, _DENSE, _EXPERTS = ("attention",), ("delta_net",), ("dense",), ("experts",)
_SIZE, _SHARED = "experts.expert_size", "experts.shared_size"
_VALUES, _CONV, _V_HEADS = "delta_net.value_width", "delta_net.conv_width", "delta_net.n_value_heads"
_STACK = ("experts.n_experts",)
_PARTS = {"gate": (_SIZE, "hidden_size"), "up": (_SIZE, "hidden_size"), "down": ("hidden_size", _SIZE)}

# Names without their prefixes `layers.{i}.`, `blk.{i}.` and `model.layers.{i}.`; `{e}` is the number of an expert, and
# `{mlp}`, `{router}` and `{ffn_norm}` are what the family says.
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

_FORMS = sorted({family.layout.multimodal_prefixes for family in FAMILIES.values() if family.multimodal_type})


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of one model."""

    name: str
    gguf: str
    huggingface: str
    shape: tuple[int, ...]
    interleaved_heads: int  # heads whose rows a GGUF file of this model holds in pairs; 0: rows as in Hugging Face
    is_matrix: bool = True  # multiplied with and quantised, alone or as one of a stack of experts
    in_gguf: Layout = AS_IS
    in_huggingface: Layout = AS_IS

    @property
    def stays_f32(self) -> bool:
        """True if a GGUF file has it in F32, whatever its matrices are."""
        return not self.is_matrix or self.name.rpartition(".")[2] in ("router", "shared_gate")


def inventory(config: ModelConfig) -> dict[str, Weight]:
    """Return every weight of a model by canonical name, in the order of the forward pass inside a layer."""
    family, weights = FAMILIES[config.family], {}
    words = family.layout.all_names
    layers: list[int | None] = [None, *range(config.n_layers)]
    for layer in layers:
        traits = config.traits(layer)
        ours, gguf, huggingface = ("", "", "") if layer is None else prefixes_of(layer)
        for row in MODEL_WEIGHTS if layer is None else LAYER_WEIGHTS:
            if not traits.issuperset(row.needs):
                continue
            weight = Weight(
                ours + row.name,
                gguf + row.gguf.format(**words),
                huggingface + row.huggingface.format(e="{e}", **words),
                tuple(1 if axis == "one" else attrgetter(axis)(config) for axis in row.axes),
                getattr(config, row.heads) if row.heads and family.layout.interleaved_rope == "gguf" else 0,
                row.is_matrix and len(row.axes) > 1,
            )
            weights[weight.name] = _laid_out(weight, row.name, config, family)
    return weights


def count_parameters(config: ModelConfig) -> int:
    """Count the numbers of all weights of a model."""
    return sum(math.prod(weight.shape) for weight in inventory(config).values())


def prefixes_of(layer: int) -> tuple[str, str, str]:
    """Return the prefixes of a layer's weight names: in llorch, in GGUF files, in Hugging Face folders."""
    return f"layers.{layer}.", f"blk.{layer}.", f"model.layers.{layer}."


def path_in_whole(path: str, multimodal_prefixes: tuple[str, str]) -> str:
    """Return the path of a text module inside a multimodal model; `multimodal_prefixes` comes from its family."""
    alone, whole = multimodal_prefixes
    return whole + path.removeprefix(alone) if path.startswith(alone) else path


def form_of(path: str) -> tuple[str, str]:
    """Return the `multimodal_prefixes` of a path in the text part of a multimodal model; else two empty strings."""
    return next((form for form in _FORMS if path.startswith(form[1])), ("", ""))


def path_alone(path: str) -> str:
    """Return the path in the text model of a module or tensor of a multimodal model; other paths stay."""
    alone, whole = form_of(path)
    return alone + path.removeprefix(whole)


def _laid_out(weight: Weight, short: str, config: ModelConfig, family: Family) -> Weight:
    """Add the layouts of a weight that differ from one tensor in Hugging Face's order."""
    net = config.delta_net
    if family.layout.norm_weight_offset and short.endswith("norm") and short != "delta_norm":
        return replace(weight, in_huggingface=Layout(form="less_one"))
    if family.layout.transposed_experts == "modules" and short.startswith("experts_"):
        return _fused(weight, short, turned=True)
    if net is None:
        return weight
    tiled = family.delta_net == "separate"
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
                weight, huggingface=name, gguf=gguf, in_huggingface=joined_layout(short, net, weight.shape[1])
            )
        case _:
            return weight


def _fused(weight: Weight, short: str, *, turned: bool) -> Weight:
    """Place a weight in the tensors that hold all experts of a layer."""
    n_experts, n_out, n_in = weight.shape
    prefix = weight.huggingface.partition("experts.")[0] + "experts."
    if short == "experts_down_proj":
        shape = (n_experts, n_in, n_out) if turned else weight.shape
        return replace(weight, huggingface=f"{prefix}down_proj", in_huggingface=Layout(shape=shape, turned=turned))
    shape = (n_experts, n_in, 2 * n_out) if turned else (n_experts, 2 * n_out, n_in)
    layout = Layout(shape=shape, half=0 if short == "experts_gate_proj" else 1, turned=turned)
    return replace(weight, huggingface=f"{prefix}gate_up_proj", in_huggingface=layout)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file to be, and the weights that lie in it; of a stack in a tensor for each its number."""

    name: str
    shape: tuple[int, ...]
    weights: tuple[Weight, ...]
    expert: int | None = None


def written_family(config: ModelConfig) -> str:
    """Return the family that is written for the text part alone: one with the same computation."""
    return FAMILIES[config.family].written_as or config.family


def gguf_tensors(config: ModelConfig) -> list[Tensor]:
    """List the tensors of a GGUF file."""
    return _join_tensors((weight.gguf, weight.in_gguf, weight) for weight in inventory(config).values())


def huggingface_tensors(config: ModelConfig) -> list[Tensor]:
    """List the tensors of a Hugging Face folder of the text alone; experts as transformers writes them."""
    config = replace(config, family=written_family(config))
    tensors = _join_tensors(
        (weight.huggingface, weight.in_huggingface, weight) for weight in inventory(config).values()
    )
    return [one for tensor in tensors for one in _each_expert(tensor)]


def _join_tensors(rows: Iterable[tuple[str, Layout, Weight]]) -> list[Tensor]:
    """Build tensors from rows of weights; rows with one name become one tensor."""
    found: dict[str, Tensor] = {}
    for name, layout, weight in rows:
        before = found[name].weights if name in found else ()
        found[name] = Tensor(name, layout.shape or weight.shape, (*before, weight))
    return [*found.values()]


def _each_expert(tensor: Tensor) -> list[Tensor]:
    """Split a tensor into one for each expert, if its name has a place for the expert's number."""
    if "{e}" not in tensor.name:
        return [tensor]
    n_experts, *shape = tensor.shape
    return [Tensor(tensor.name.format(e=e), tuple(shape), tensor.weights, e) for e in range(n_experts)]


def found_in(names: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Weight]:
    """Return the inventory, adapted to the tensors of a file, whose names have shapes here."""
    family = FAMILIES[config.family]
    return {name: _as_found(weight, names, family) for name, weight in inventory(config).items()}


def _as_found(weight: Weight, names: Mapping[str, tuple[int, ...]], family: Family) -> Weight:
    """Adapt a weight where converters disagree: joined experts, the oldest Qwen3-Next."""
    short = weight.name.rpartition(".")[2]
    if short.startswith("experts_"):
        if not weight.in_huggingface.turned and weight.huggingface.format(e=0) not in names:
            turned = family.layout.transposed_experts == "files" and not _is_straight(weight, short, names)
            fused = _fused(weight, short, turned=turned)
            weight = fused if fused.huggingface in names else weight
        joined_name = weight.gguf.replace(f"ffn_{short.split('_')[1]}_exps", "ffn_gate_up_exps")
        if weight.gguf not in names and joined_name in names:
            weight = replace(weight, gguf=joined_name, in_gguf=_fused(weight, short, turned=False).in_huggingface)
    legacy = weight.gguf.replace(".attn_qkv.", ".ssm_in.").replace(".attn_gate.", ".ssm_in.")
    if short in ("in_qkv", "in_z") and weight.gguf not in names and legacy in names:
        weight = replace(weight, gguf=legacy, in_gguf=weight.in_huggingface)
    return weight


def _is_straight(weight: Weight, short: str, names: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell if both tensors of experts are (experts, out, in): one may have the same shape both ways, not both."""
    prefix, (n_experts, n_out, n_in) = weight.huggingface.partition("experts.")[0], weight.shape
    size, hidden = (n_in, n_out) if short == "experts_down_proj" else (n_out, n_in)
    return (
        names.get(f"{prefix}experts.gate_up_proj") == (n_experts, 2 * size, hidden)
        and names.get(f"{prefix}experts.down_proj") == (n_experts, hidden, size)
    )  # fmt: skip


def undo_interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Bring rows of q or k, weight or bias, from the pairs of Llama GGUF files to the halves of Hugging Face."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])  # (heads, half, 2, ...)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Bring rows of q or k from halves to pairs: element j of a head's first half, then element j of its second."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])  # (heads, 2, half, ...)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def is_plain_name(name: str) -> bool:
    """Tell if a name from a file is harmless in messages, C strings and paths."""
    return bool(name) and name.isprintable() and not any(part in name for part in ("/", "\\", ".."))
