"""Stages by other engines' names: llama.cpp's graph nodes and Hugging Face's modules, taken from `stages.table`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llorch.families.config import ModelConfig
from llorch.stages.table import BY_NAME, FUSABLE, STAGES

RAW_SCORES = "kq"  # query times key, neither scaled nor masked
_EXTRA_NODES = {
    "inp_embd": "embed", "kqv_merged_cont": "attn_context", "kq_soft_max_ext": "attn_probs",
    "attn_residual": "attn_residual", "attn_post_norm": "ffn_norm",
}  # fmt: skip
_NO_STAGES = re.compile(r".* \((?:view|reshaped|permuted|transposed|cont|copy.*)\)|(?:norm|kqv)(?:-[0-9]+)?")  # nodes
_PROJECTED = {"Qcur": "q", "Kcur": "k", "Vcur": "v"}  # node name of several arrays -> letter of the projection
_EXTRA_MODULES = {  # (path in the layer, end) -> stages
    ("self_attn", "output"): ("attn_out",),
    ("mlp", "output"): ("ffn_out",),
    ("self_attn.qkv_proj", "output"): FUSABLE[0],
    ("mlp.gate_up_proj", "output"): FUSABLE[1],
}


@dataclass(frozen=True)
class Meaning:
    """Stages that an engine's name means.

    Attributes:
        stages: One stage, `kq`, or fused projections; none for an array that is no stage.
        layer: Number of the layer; None outside the layers, or if neither name nor dump has a layer.
        by_llamacpp: True if the name is llama.cpp's name of a node.
        assumed: Assumption about an ambiguous name, for a note to the user.
    """

    stages: tuple[str, ...]
    layer: int | None = None
    by_llamacpp: bool = False
    assumed: str = ""


def _nodes() -> dict[str, list[str]]:
    """Map each llama.cpp node that is a stage to its possible stages; a layer has one of them."""
    stages_by_node: dict[str, list[str]] = {}
    for stage in STAGES:
        node = re.match(r"(\w+)(?:-\{i\})?(?: \(|,)", stage.llamacpp)
        if node and node[1] not in _PROJECTED:
            stages_by_node.setdefault(node[1], []).append(stage.name)
    return stages_by_node | {node: [stage] for node, stage in _EXTRA_NODES.items()}


def _stages_by_module() -> dict[tuple[str, str], list[tuple[str, ...]]]:
    """Map a module's path in its layer (empty: the layer) and `input` or `output` to possible stages."""
    alternatives = {module_end: [stages] for module_end, stages in _EXTRA_MODULES.items()}
    for stage in STAGES:
        match = re.fullmatch(r"(output|input) of (?:layers\.\{i\}\.?|model\.)?([\w.]*)", stage.transformers)
        if match:
            alternatives.setdefault((match[2], match[1]), []).append((stage.name,))
    return alternatives


NODES: Mapping[str, list[str]] = _nodes()
MODULES: Mapping[tuple[str, str], list[tuple[str, ...]]] = _stages_by_module()


def _choose_for_layer(alternatives: list[tuple[str, ...]], config: ModelConfig, layer: int | None) -> tuple[str, ...]:
    """Choose the last alternative whose stages a layer has, else the first; later alternatives are more special."""
    if layer is None or layer < config.n_layers:
        for stages in reversed(alternatives):
            if all(BY_NAME[stage].in_layer == (layer is not None) for stage in stages) and all(
                BY_NAME[stage].applies_to(config, layer) for stage in stages
            ):
                return stages
    return alternatives[0]


def meaning_of(name: str, layer: int | None, config: ModelConfig, *, op: str, nth: int, of: int) -> Meaning | None:
    """Return the meaning of a name, without stages for a llama.cpp node that is no stage; None if it is unknown.

    `layer` and `op`, ggml's operation, are declared apart from the name, if at all. The array is number `nth`, from 0,
    of the `of` arrays of this name in its pass.
    """
    if _NO_STAGES.fullmatch(name):  # `norm` is before the gain; transformers' final norm is `model.norm`
        return Meaning((), by_llamacpp=True)
    meaning = _parse_llorch(name, layer) or _parse_llamacpp(name, layer, config, op, nth, of)
    if meaning or op:
        return meaning
    return _parse_transformers_output(name, config) or _parse_module(name, layer, config)


def nameless(name: str, op: str, before: Meaning | None, config: ModelConfig) -> Meaning | None:
    """Return the meaning of a node that llama.cpp names only by a number; None if it is no stage.

    Its operation and `before`, the meaning of the stage before it, decide. Such nodes are flash attention and, in most
    families, the product with `o_proj`.
    """
    if before is None or before.layer is None or not re.fullmatch("node_[0-9]+", name):
        return None
    if op == "FLASH_ATTN_EXT":
        return Meaning(("attn_context",), before.layer, True)
    is_product = op == "MUL_MAT" and before.stages == ("attn_context",) and not config.o_bias
    return Meaning(("attn_out",), before.layer, True) if is_product else None


def _parse_llorch(name: str, layer: int | None) -> Meaning | None:
    """Parse one of llorch's stage names, with or without a layer before it; None for other names."""
    match = re.fullmatch(r"(?:(?:l|layers?|blk|blocks?)[._]?([0-9]{1,4})[._])?(\w+)", name)
    stage = BY_NAME.get(match[2]) if match else None
    if match is None or stage is None:
        return None
    layer = int(match[1]) if match[1] else layer
    return Meaning((stage.name,), layer) if stage.in_layer == (layer is not None) else None


def _parse_llamacpp(name: str, layer: int | None, config: ModelConfig, op: str, nth: int, of: int) -> Meaning | None:
    """Parse the name of a llama.cpp node; `nth` and `of` as in `meaning_of`; None for other names."""
    match = re.fullmatch(r"(\w+?)(?:-([0-9]{1,4}))?", name)
    if match is None:
        return None
    layer = int(match[2]) if match[2] else layer
    if match[1] in _PROJECTED and layer is not None:
        return _identify_projection(_PROJECTED[match[1]], layer, config, op, nth, of)
    if match[1] == RAW_SCORES and layer is not None:
        return Meaning((RAW_SCORES,), layer, True)
    if match[1] not in NODES:
        return None
    (stage,) = _choose_for_layer([(stage,) for stage in NODES[match[1]]], config, layer)
    return Meaning((stage,), layer, True) if BY_NAME[stage].in_layer == (layer is not None) else None


def _identify_projection(letter: str, layer: int, config: ModelConfig, op: str, nth: int, of: int) -> Meaning:
    """Identify one of up to four arrays named `Qcur`: product, sum with the bias, reshape (no stage), or rotated heads.

    Without an operation, the order decides: the rotated heads come last, and the product (or sum) first.
    """
    projected, rotated = (f"{letter}_proj",), (f"{letter}_rope",) if letter != "v" else (f"{letter}_proj",)
    if op:
        stages = {"ADD" if config.qkv_bias else "MUL_MAT": projected, "ROPE": rotated}.get(op, ())
        return Meaning(stages, layer, True)
    name = f"{letter.upper()}cur"
    without_operation = f"{name} comes without an operation: llorch reads"
    if nth == of - 1:
        part = "the projection" if letter == "v" else "the rotated heads"
        return Meaning(rotated, layer, True, f"{without_operation} the last {name} as {part}")
    if nth == int(config.qkv_bias) and letter != "v":
        part = "the sum with the bias" if config.qkv_bias else "the product"
        return Meaning(projected, layer, True, f"{without_operation} the first {name} as {part}")
    return Meaning((), layer, True)


def _parse_transformers_output(name: str, config: ModelConfig) -> Meaning | None:
    """Parse an output of transformers like `hidden_states.3`; only the last hidden state is after the final norm."""
    match = re.fullmatch(r"(hidden_states|attentions|past_key_values)[._]([0-9]{1,4})(?:[._](key|value|0|1)s?)?", name)
    if match is None or (match[3] is not None) != (match[1] == "past_key_values"):
        return None
    number = int(match[2])
    if match[1] == "attentions":
        return Meaning(("attn_probs",), number)
    if match[3]:
        return Meaning(("k_cache" if match[3] in ("key", "0") else "v_cache",), number)
    if number == config.n_layers:
        return Meaning(("final_norm",), assumed=f"{name} is the output of the final norm, as in transformers")
    return Meaning(("block_out",), number - 1) if number else Meaning(("embed",))


def _parse_module(name: str, layer: int | None, config: ModelConfig) -> Meaning | None:
    """Parse the path of a transformers module, with or without `.input` or `.output`; None for other names."""
    match = re.fullmatch(r"(?:[\w.]*\.)?layers\.([0-9]{1,4})\.?([\w.]*)", name)
    if match:
        layer, path = int(match[1]), match[2]
    else:
        path = name.rpartition("model.")[2]
    end = re.fullmatch(r"([\w.]*?)\.?(input|output)(?:\.0)?", path)
    module_end = (end[1], end[2]) if end else (path, "output")
    if module_end not in MODULES or (not path and not match):
        return None
    stages = _choose_for_layer(MODULES[module_end], config, layer)
    return Meaning(stages, layer) if BY_NAME[stages[0]].in_layer == (layer is not None) else None
