"""Names that others gave the stages: llama.cpp its nodes, Hugging Face its modules; taken from the stage table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llorch.families.config import ModelConfig
from llorch.stages.table import BY_NAME, FUSABLE, STAGES

RAW_SCORES = "kq"  # query times key, neither scaled nor masked
_NODES_BESIDE_THE_TABLE = {
    "inp_embd": "embed", "kqv_merged_cont": "attn_context", "kq_soft_max_ext": "attn_probs",
    "attn_residual": "attn_residual", "attn_post_norm": "ffn_norm",
}  # fmt: skip
_NO_STAGES = re.compile(r".* \((?:view|reshaped|permuted|transposed|cont|copy.*)\)|(?:norm|kqv)(?:-[0-9]+)?")  # nodes
_PROJECTED = {"Qcur": "q", "Kcur": "k", "Vcur": "v"}
_MODULES_BESIDE_THE_TABLE = {
    ("self_attn", "output"): ("attn_out",),
    ("mlp", "output"): ("ffn_out",),
    ("self_attn.qkv_proj", "output"): FUSABLE[0],
    ("mlp.gate_up_proj", "output"): FUSABLE[1],
}


@dataclass(frozen=True)
class Meaning:
    """What a name stands for.

    Attributes:
        stages: A stage, or `kq`, or the projections that are fused; none for what is no stage.
        layer: None outside the layers, or where the name does not say.
        by_llamacpp: Whether it is a node of llama.cpp.
        assumed: What was assumed, for a note.
    """

    stages: tuple[str, ...]
    layer: int | None = None
    by_llamacpp: bool = False
    assumed: str = ""


def _nodes() -> dict[str, list[str]]:
    """Map each node of llama.cpp that stands for a stage to its possible stages; the layer decides which."""
    found: dict[str, list[str]] = {}
    for stage in STAGES:
        node = re.match(r"(\w+)(?:-\{i\})?(?: \(|,)", stage.llamacpp)
        if node and node[1] not in _PROJECTED:
            found.setdefault(node[1], []).append(stage.name)
    return found | {node: [stage] for node, stage in _NODES_BESIDE_THE_TABLE.items()}


def _stages_by_module() -> dict[tuple[str, str], list[tuple[str, ...]]]:
    """Map a module's path in its layer (empty: the layer) and the watched end of the module to stages."""
    found = {place: [stages] for place, stages in _MODULES_BESIDE_THE_TABLE.items()}
    for stage in STAGES:
        parts = re.fullmatch(r"(output|input) of (?:layers\.\{i\}\.?|model\.)?([\w.]*)", stage.transformers)
        if parts:
            found.setdefault((parts[2], parts[1]), []).append((stage.name,))
    return found


NODES: Mapping[str, list[str]] = _nodes()
MODULES: Mapping[tuple[str, str], list[tuple[str, ...]]] = _stages_by_module()


def _of_layer(alternatives: list[tuple[str, ...]], config: ModelConfig, layer: int | None) -> tuple[str, ...]:
    """Choose the stages that a layer has: the last that the layer makes, else the meaning in other models."""
    if layer is None or layer < config.n_layers:
        for stages in reversed(alternatives):
            if all(BY_NAME[stage].in_layer == (layer is not None) for stage in stages) and all(
                BY_NAME[stage].applies_to(config, layer) for stage in stages
            ):
                return stages
    return alternatives[0]


def meaning_of(name: str, layer: int | None, config: ModelConfig, *, op: str, nth: int, of: int) -> Meaning | None:
    """Look up the stages that a name stands for: none for a node of llama.cpp that is no stage; None if unknown.

    `op` is the operation of ggml, where the dump states it. The array is the `nth`, from 0, of the arrays of this name
    in the pass.
    """
    if _NO_STAGES.fullmatch(name):  # `norm` is not multiplied with its gain yet; that of transformers is `model.norm`
        return Meaning((), by_llamacpp=True)
    known = _ours(name, layer) or _llamacpp(name, layer, config, op, nth, of)
    if known or op:
        return known
    return _output_of_transformers(name, config) or _module(name, layer, config)


def nameless(name: str, op: str, before: Meaning | None, config: ModelConfig) -> Meaning | None:
    """Look up the stages of a node that llama.cpp names only by a number.

    The operation and the stage `before` decide. Such nodes are flash attention and, in most families, the product with
    `o_proj`. None for other nodes.
    """
    if before is None or before.layer is None or not re.fullmatch("node_[0-9]+", name):
        return None
    if op == "FLASH_ATTN_EXT":
        return Meaning(("attn_context",), before.layer, True)
    is_product = op == "MUL_MAT" and before.stages == ("attn_context",) and not config.o_bias
    return Meaning(("attn_out",), before.layer, True) if is_product else None


def _ours(name: str, layer: int | None) -> Meaning | None:
    """Parse one of llorch's own stage names, with or without a layer in front of it; None for other names."""
    parts = re.fullmatch(r"(?:(?:l|layers?|blk|blocks?)[._]?([0-9]{1,4})[._])?(\w+)", name)
    stage = BY_NAME.get(parts[2]) if parts else None
    if parts is None or stage is None:
        return None
    layer = int(parts[1]) if parts[1] else layer
    return Meaning((stage.name,), layer) if stage.in_layer == (layer is not None) else None


def _llamacpp(name: str, layer: int | None, config: ModelConfig, op: str, nth: int, of: int) -> Meaning | None:
    """Interpret the name of a llama.cpp node, the `nth` of `of` with this name; None if it is no stage."""
    parts = re.fullmatch(r"(\w+?)(?:-([0-9]{1,4}))?", name)
    if parts is None:
        return None
    layer = int(parts[2]) if parts[2] else layer
    if parts[1] in _PROJECTED and layer is not None:
        return _projected(_PROJECTED[parts[1]], layer, config, op, nth, of)
    if parts[1] == RAW_SCORES and layer is not None:
        return Meaning((RAW_SCORES,), layer, True)
    if parts[1] not in NODES:
        return None
    (stage,) = _of_layer([(stage,) for stage in NODES[parts[1]]], config, layer)
    return Meaning((stage,), layer, True) if BY_NAME[stage].in_layer == (layer is not None) else None


def _projected(letter: str, layer: int, config: ModelConfig, op: str, nth: int, of: int) -> Meaning:
    """Read one of up to four arrays named `Qcur`: product, sum with the bias, a reshape of it, or rotated heads."""
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


def _output_of_transformers(name: str, config: ModelConfig) -> Meaning | None:
    """Look up outputs that transformers names by number. The last hidden state is the output of the final norm."""
    parts = re.fullmatch(r"(hidden_states|attentions|past_key_values)[._]([0-9]{1,4})(?:[._](key|value|0|1)s?)?", name)
    if parts is None or (parts[3] is not None) != (parts[1] == "past_key_values"):
        return None
    n = int(parts[2])
    if parts[1] == "attentions":
        return Meaning(("attn_probs",), n)
    if parts[3]:
        return Meaning(("k_cache" if parts[3] in ("key", "0") else "v_cache",), n)
    if n == config.n_layers:
        return Meaning(("final_norm",), assumed=f"{name} is the output of the final norm, as in transformers")
    return Meaning(("block_out",), n - 1) if n else Meaning(("embed",))


def _module(name: str, layer: int | None, config: ModelConfig) -> Meaning | None:
    """Parse the path of a transformers module, with or without `.input` or `.output`; None for other names."""
    parts = re.fullmatch(r"(?:[\w.]*\.)?layers\.([0-9]{1,4})\.?([\w.]*)", name)
    if parts:
        layer, path = int(parts[1]), parts[2]
    else:
        path = name.rpartition("model.")[2]
    end = re.fullmatch(r"([\w.]*?)\.?(input|output)(?:\.0)?", path)
    place = (end[1], end[2]) if end else (path, "output")
    if place not in MODULES or (not path and not parts):
        return None
    stages = _of_layer(MODULES[place], config, layer)
    return Meaning(stages, layer) if BY_NAME[stages[0]].in_layer == (layer is not None) else None
