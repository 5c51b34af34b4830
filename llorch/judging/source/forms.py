"""Lawful forms in which a file stores the weights of a text model: order of rows, values, fused and stacked tensors.

The forms are stated here a second time, independent of llorch's reader and writer, which can then be checked with them.
Canonical names are module paths of the text model in transformers, without numbers of experts. Canonical values are
those that the model computes with, in the order of transformers: norm gains with their 1 added, and -exp(A_log).

Source: the tensor name map of the gguf package; llama.cpp conversion/{base,llama,qwen,qwen3vl}.py (`permute`,
`_reorder_v_heads`, `modify_tensors`); transformers `modeling_*.py` of the architectures below.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from llorch.families.config import ModelConfig
from llorch.families.layers import DeltaNet
from llorch.families.table import FAMILIES

Value = Literal["same", "plus one", "minus exp"]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape, the contiguous axis last
NameOf = Callable[[str], str]  # module path -> tensor name, empty if the format has none

# Facts of architectures, by their names in GGUF files.
_PERMUTED = {"llama", "mistral3", "smollm3"}  # GGUF: rows 2j and 2j + 1 of a head of q or k are its rows j, j + half
_TILED = {"qwen35", "qwen35moe"}  # GGUF: value head t reads key head t % n_key_heads
_NORMS_MINUS_ONE = {"qwen3next", "qwen35", "qwen35moe"}  # folder: the model computes with 1 + w
_WITH_MTP = {"qwen3next", "qwen35", "qwen35moe"}  # files may have layers for multi-token prediction
_FEED_FORWARD = {"llama4": ("feed_forward", "router")}  # names of the block and of its router; else `mlp` and `gate`
_FUSED_PROJECTIONS = {"qkv": ("qkvz", (0, 1, 2)), "z": ("qkvz", (3,)), "b": ("ba", (0,)), "a": ("ba", (1,))}

_TEXT_PATH = re.compile(
    r"(?:model\.language_model\.|language_model\.(?:model\.)?|model\.)?(?P<module>(?:layers|embed_tokens|norm)\..+)"
    r"|(?:language_model\.)?(?P<head>lm_head\..+)"
)
_ROPE_FACTORS, _ROPE_FREQUENCIES = "rope_freqs.weight", ".rotary_emb.inv_freq"
_IMAGE = ("model.visual.", "visual.", "vision_model.", "vision_tower.", "model.vision_tower.", "multi_modal_projector.")
_MTP = ("mtp.", "model.mtp.", "blk.")


@dataclass(frozen=True, eq=False)
class Form:
    """Lawful form of one weight in a file.

    To compute the weight, transpose each expert if `is_transposed`, reshape each tensor to (-1, columns of the weight),
    join them along their rows, select `rows` and `columns`, and compute `value` in float64. A vector has one column.
    """

    tensors: tuple[str, ...]  # stored tensors; several if each expert has a tensor
    shape: tuple[int, ...]  # expected shape of one stored tensor; axes of length 1 are those of the file
    weight_shape: tuple[int, int]  # rows and columns of the weight; the experts of a stack follow each other
    rows: np.ndarray | None = None  # row of the joined tensors for each row of the weight; None: the same order
    columns: np.ndarray | None = None  # stored column for each column of the weight; None: the same order
    is_transposed: bool = False  # the tensor is (experts, in, out)
    value: Value = "same"  # weight from the stored values w: w, w + 1 or -exp(w)


def gguf_forms(names: Shapes, config: ModelConfig) -> dict[str, Form]:
    """Map each canonical weight that a GGUF file stores to its form; `names` maps the file's tensors to shapes.

    A form names all experts, and the shape that the configuration requires. The caller compares both with the file.
    """
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    tensor_map = get_tensor_name_map(architectures[FAMILIES[config.family].gguf], config.n_layers)
    forms = _find_forms(names, config, lambda path: _gguf_name(path, tensor_map), stacks={})
    return {weight: _with_gguf_order(weight, form, config) for weight, form in forms.items()}


def folder_forms(names: Shapes, config: ModelConfig) -> dict[str, Form]:
    """Map each canonical weight that a Hugging Face folder stores to its form, as `gguf_forms` does.

    The folder may hold a multimodal model, or a model that was saved without its head.
    """
    name_by_path: dict[str, str] = {}
    for name in names:
        if match := _TEXT_PATH.fullmatch(name):
            name_by_path.setdefault(match["head"] or f"model.{match['module']}", name)
    stacks = {path: names[name] for path, name in name_by_path.items() if ".experts." in path}
    forms = _find_forms(names, config, lambda path: name_by_path.get(path, path), stacks)
    return {weight: replace(form, value=_folder_value(weight, config)) for weight, form in forms.items()}


def additional(names: Shapes, forms: Mapping[str, Form], config: ModelConfig) -> list[str]:
    """List the tensors that no form has, except RoPE factors, the image part and multi-token prediction."""
    used = {_ROPE_FACTORS, *(name for form in forms.values() for name in form.tensors)}
    outside = _IMAGE if config.part_of_whole else ()
    unused = [n for n in names if not (n in used or n.endswith(_ROPE_FREQUENCIES) or n.startswith(outside))]
    if FAMILIES[config.family].gguf in _WITH_MTP:  # in a GGUF file: blocks after the last layer
        blocks = tuple(f"blk.{layer}." for layer in range(config.n_layers))
        unused = [name for name in unused if not name.startswith(_MTP) or name.startswith(blocks)]
    return unused


def _find_forms(names: Shapes, config: ModelConfig, name_of: NameOf, stacks: Shapes) -> dict[str, Form]:
    """Find the form of each stored weight; `stacks` has the shapes of tensors that may be transposed."""
    forms: dict[str, Form] = {}
    for weight, shape in _weight_shapes(config).items():
        for form in _forms_by_path(weight, shape, stacks, config.delta_net):
            tensors = tuple(name_of(path) for path in form.tensors)
            if stored := [names[name] for name in tensors if name in names]:
                is_expected = [size for size in stored[0] if size != 1] == [size for size in form.shape if size != 1]
                forms[weight] = replace(form, tensors=tensors, shape=stored[0] if is_expected else form.shape)
                break
    return forms


def _weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that a layer may have: vectors, matrices, and stacks (experts, out, in)."""
    hidden, matrix, layers = config.hidden_size, (config.vocab_size, config.hidden_size), range(config.n_layers)
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,),
        "self_attn.o_proj.weight": (hidden, config.q_width), "self_attn.o_proj.bias": (hidden,),
    }  # fmt: skip
    for part, n_rows in (("q", config.q_rows), ("k", config.kv_width), ("v", config.kv_width)):
        in_layer |= {f"self_attn.{part}_proj.weight": (n_rows, hidden), f"self_attn.{part}_proj.bias": (n_rows,)}
    in_layer |= _feed_forward_shapes(config) | _delta_net_shapes(config.delta_net, hidden)
    shapes = {"model.embed_tokens.weight": matrix, "model.norm.weight": (hidden,), "lm_head.weight": matrix}
    return shapes | {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in in_layer.items()}


def _feed_forward_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    mlp, router = _FEED_FORWARD.get(FAMILIES[config.family].gguf, ("mlp", "gate"))
    hidden, blocks, shapes = config.hidden_size, {mlp: [config.intermediate_size]}, dict[str, tuple[int, ...]]()
    if (experts := config.experts) is not None:
        blocks |= {f"{mlp}.experts": [experts.n_experts, experts.expert_size]}
        blocks |= {f"{mlp}.shared_expert": [experts.shared_size]}
        shapes |= {f"{mlp}.{router}.weight": (experts.n_experts, hidden)}
        shapes |= {f"{mlp}.shared_expert_gate.weight": (1, hidden)}
    for block, (*n_experts, size) in blocks.items():
        shapes |= {f"{block}.{part}_proj.weight": (*n_experts, size, hidden) for part in ("gate", "up")}
        shapes |= {f"{block}.down_proj.weight": (*n_experts, hidden, size)}
    return shapes


def _delta_net_shapes(net: DeltaNet | None, hidden_size: int) -> dict[str, tuple[int, ...]]:
    if net is None:
        return {}
    n_heads, n_channels = net.n_value_heads, net.conv_width
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (n_channels, hidden_size), "in_proj_z.weight": (net.value_width, hidden_size),
        "in_proj_b.weight": (n_heads, hidden_size), "in_proj_a.weight": (n_heads, hidden_size),
        "conv1d.weight": (n_channels, net.conv_kernel), "dt_bias": (n_heads,), "A_log": (n_heads,),
        "norm.weight": (net.value_head_dim,), "out_proj.weight": (hidden_size, net.value_width),
    }  # fmt: skip
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _forms_by_path(weight: str, shape: tuple[int, ...], stacks: Shapes, net: DeltaNet | None) -> Iterator[Form]:
    """Yield the forms of a weight, with module paths in place of tensor names; `stacks` as in `_find_forms`."""
    *leading, last = shape
    whole = Form((weight,), shape, (math.prod(leading), last) if leading else (last, 1))
    yield whole
    if len(leading) > 1:
        yield from _expert_forms(whole, stacks)
    elif ".in_proj_" in weight and net is not None:
        prefix, _, part = weight.removesuffix(".weight").rpartition("_")
        n_values = net.n_value_heads // net.n_key_heads
        qkvz = (net.key_head_dim, net.key_head_dim, n_values * net.value_head_dim, n_values * net.value_head_dim)
        fused, parts = _FUSED_PROJECTIONS[part]
        widths = {"qkvz": qkvz, "ba": (n_values, n_values)}[fused]
        shape, rows = (net.n_key_heads * sum(widths), last), _part_rows(net.n_key_heads, widths, parts)
        yield replace(whole, tensors=(f"{prefix}_{fused}.weight",), shape=shape, rows=rows)


def _expert_forms(whole: Form, stacks: Shapes) -> Iterator[Form]:
    """Yield the forms of a stack: one tensor for each expert, or gate and up fused, transposed or not."""
    n_experts, n_out, n_in = whole.shape
    prefix, _, part = whole.tensors[0].removesuffix("_proj.weight").rpartition(".")
    paths = tuple(f"{prefix}.{expert}.{part}_proj.weight" for expert in range(n_experts))
    yield replace(whole, tensors=paths, shape=(n_out, n_in))
    size, hidden = (n_in, n_out) if part == "down" else (n_out, n_in)
    shapes = {"gate_up": (n_experts, 2 * size, hidden), "down": (n_experts, hidden, size)}
    transposed = {name: (n_experts, n_columns, n_rows) for name, (_, n_rows, n_columns) in shapes.items()}
    # The experts of one stack may be square, so that both shapes are equal. Then the other stack decides.
    is_transposed = any(stacks.get(f"{prefix}.{name}_proj") == transposed[name] != shapes[name] for name in shapes)
    stack = "down" if part == "down" else "gate_up"
    rows = None if part == "down" else _part_rows(n_experts, (n_out, n_out), (int(part == "up"),))
    shape = (transposed if is_transposed else shapes)[stack]
    yield replace(whole, tensors=(f"{prefix}.{stack}_proj",), shape=shape, rows=rows, is_transposed=is_transposed)


def _folder_value(weight: str, config: ModelConfig) -> Value:
    if weight.endswith("norm.weight") and not weight.endswith("linear_attn.norm.weight"):
        return "plus one" if FAMILIES[config.family].gguf in _NORMS_MINUS_ONE else "same"
    return "minus exp" if weight.endswith(".A_log") else "same"


def _gguf_name(path: str, tensor_map: TensorNameMap) -> str:
    # The map has no fused experts for some architectures for which llama.cpp fuses them.
    in_map = path.replace(".dt_bias", ".dt_proj.bias").replace(".gate_up_proj", ".gate_proj.weight")
    name = tensor_map.get_name(in_map, try_suffixes=(".weight", ".bias")) or ""
    return name.replace("ffn_gate_exps", "ffn_gate_up_exps") if path.endswith(".gate_up_proj") else name


def _with_gguf_order(weight: str, form: Form, config: ModelConfig) -> Form:
    """Set the order of rows and columns in a GGUF file."""
    architecture, net, (n_rows, n_columns) = FAMILIES[config.family].gguf, config.delta_net, form.weight_shape
    module = weight.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
    if architecture in _PERMUTED and module in heads:
        return replace(form, rows=_swapped(n_rows, (heads[module], config.head_dim // 2, 2, 1)))
    if architecture not in _TILED or net is None or ".linear_attn." not in weight or module == "norm":
        return form
    width = 1 if module in ("in_proj_b", "in_proj_a", "dt_bias", "A_log") else net.value_head_dim
    stored = (1, net.n_value_heads // net.n_key_heads, net.n_key_heads, width)
    if module == "out_proj":
        return replace(form, columns=_swapped(n_columns, stored))
    return replace(form, rows=_swapped(n_rows, stored))


# The caches let all layers share an array.
@lru_cache(maxsize=8)
def _swapped(length: int, stored: tuple[int, int, int, int]) -> np.ndarray:
    """Return the stored row of each row: the last rows are stored in axes `stored`, of which the middle ones change."""
    n_leading = length - math.prod(stored)
    swapped = np.arange(n_leading, length).reshape(stored).swapaxes(1, 2)
    return np.concatenate([np.arange(n_leading), swapped.reshape(-1)])


@lru_cache(maxsize=8)
def _part_rows(n_groups: int, widths: tuple[int, ...], parts: tuple[int, ...]) -> np.ndarray:
    """Return the stored row of each row of `parts`; a group (expert or key head) stores `widths` rows of each part."""
    stored = np.split(np.arange(n_groups * sum(widths)).reshape(n_groups, -1), np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([stored[part].reshape(-1) for part in parts])
