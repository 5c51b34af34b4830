"""Styles of writing a run of the port: tensors, names and file format.

all       every tensor of every pass, names of the stage table, a folder that `DumpWriter` writes
own       six tensors of the first and the last layer under the port's names, and a mapping to stages
modules   outputs of modules by Hugging Face's names, with a batch axis, of the prompt only; .npz or .safetensors
blocks    the outputs of the blocks and the logits
nodes     nodes by llama.cpp's names, with operations and llama.cpp's order of rows in queries and keys
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.diagnosis.port import OWN_NAMES, model_path
from llorch.engines.dumps.stage_dump import StageDump
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import key

Tape = Mapping[str, np.ndarray]  # arrays of a pass by the port's names
_STAGES = {port_name: stage for stage, port_name in OWN_NAMES.items()}
STYLES = ("all", "own", "modules", "blocks", "nodes")
_OWN = ("xn", "q_rot", "S", "att", "gu", "out")
_MODULES = {
    "tok": "model.embed_tokens", "xn": "input_layernorm", "q_lin": "self_attn.q_proj", "k_lin": "self_attn.k_proj",
    "v_lin": "self_attn.v_proj", "q_unit": "self_attn.q_norm", "k_unit": "self_attn.k_norm",
    "att": "self_attn.o_proj", "xm": "post_attention_layernorm", "g": "mlp.gate_proj", "u": "mlp.up_proj",
    "ffn": "mlp.down_proj", "out": "", "fin": "model.norm", "lg": "lm_head",
}  # fmt: skip
_NODES = {  # in llama.cpp's order, with operations
    "tok": ("embd", "GET_ROWS"), "xn": ("attn_norm", "MUL"), "q_lin": ("Qcur", "MUL_MAT"),
    "q_unit": ("Qcur_normed", "MUL"), "q_rot": ("Qcur", "ROPE"), "v_lin": ("Vcur", "MUL_MAT"),
    "k_lin": ("Kcur", "MUL_MAT"), "k_unit": ("Kcur_normed", "MUL"), "k_rot": ("Kcur", "ROPE"),
    "P": ("kq_soft_max", "SOFT_MAX"), "mix": ("kqv_out", "CONT"), "att": ("attn_out", "MUL_MAT"),
    "mid": ("ffn_inp", "ADD"), "xm": ("ffn_norm", "MUL"), "g": ("ffn_gate", "MUL_MAT"), "u": ("ffn_up", "MUL_MAT"),
    "gu": ("ffn_swiglu", "GLU"), "ffn": ("ffn_out", "MUL_MAT"), "out": ("l_out", "ADD"),
    "fin": ("result_norm", "MUL"), "lg": ("result_output", "MUL_MAT"),
}  # fmt: skip
_LAYOUTS = {"q_rot": lambda x: x.swapaxes(0, 1), "out": lambda x: x[None]}
MAPPING = """\
[names]
"blk{i}.xn" = "attn_norm"
"blk{i}.q_rot" = "q_rope"
"blk{i}.S" = "attn_scores"
"blk{i}.att" = "attn_out"
"blk{i}.gu" = "ffn_act"
"blk{i}.out" = "block_out"

[layout.q_rope]
axes = "heads seq head_dim"

[layout.block_out]
axes = "batch seq hidden"

[run]
dtype = "float32"
"""


@dataclass(frozen=True)
class WrittenDump:
    """Dump on disk, and information that its author gives with it."""

    path: Path
    mapping: Path | None = None
    tokens: Tokens | None = None  # if the file has none


def stage_keys(tape: Tape) -> dict[str, np.ndarray]:
    """Rename the tape of a pass to the keys of the stage table."""
    return {key(_STAGES[own_name], layer): tape[name] for name, own_name, layer in _names(tape)}


def in_memory(passes: Sequence[Tokens], tapes: Sequence[Tape]) -> StageDump:
    """Make a dump of everything, without a file."""
    return StageDump.of_arrays(passes, *map(stage_keys, tapes), source="port", dtype="float32")


def list_dumped_keys(style: str, model: str, n_pass: int, tape: Tape) -> list[str]:
    """List the stage keys of a pass that a style shows."""
    return [key(_STAGES[own_name], layer) for _, own_name, layer in _selected(style, model, n_pass, tape)]


def _selected(style: str, model: str, n_pass: int, tape: Tape) -> Iterator[tuple[str, str, int | None]]:
    """Yield the names on a tape that a style shows, with their parts."""
    outermost = 0, _config(model).n_layers - 1
    for name, own_name, layer in _names(tape):
        match style:
            case "own":
                is_selected = own_name in _OWN and layer in outermost
            case "modules":
                is_selected = own_name in _MODULES and n_pass == 0
            case "blocks":
                is_selected = own_name in ("out", "lg")
            case "nodes":
                is_selected = own_name in _NODES
            case _:
                is_selected = True
        if is_selected:
            yield name, own_name, layer


def _names(tape: Tape) -> Iterator[tuple[str, str, int | None]]:
    """Yield the names on a tape, and their parts."""
    for name in tape:
        block, dot, own_name = name.rpartition(".")
        yield name, own_name, int(block.removeprefix("blk")) if dot else None


def _config(model: str) -> ModelConfig:
    return open_weights(model_path(model)).config


def write(style: str, folder: Path, model: str, passes: Sequence[Tokens], tapes: Sequence[Tape]) -> WrittenDump:
    """Write a run into an empty folder."""
    if style == "modules":
        return _write_modules(folder, model, passes[0], tapes[0])
    if style == "nodes":
        return _write_nodes(folder, model, passes, tapes)
    with DumpWriter(folder / "dump", engine="port", dtype="" if style == "own" else "float32") as dump:
        for n_pass, (tokens, tape) in enumerate(zip(passes, tapes, strict=True)):
            dump.begin(tokens.ids, tokens.first_position)
            for name, own_name, layer in _selected(style, model, n_pass, tape):
                if style == "own":
                    dump.add(name, _LAYOUTS.get(own_name, np.asarray)(tape[name]))
                else:
                    dump.add(_STAGES[own_name], tape[name], layer=layer)
    if style != "own":
        return WrittenDump(folder / "dump")
    mapping = folder / "mapping.toml"
    mapping.write_text(MAPPING)
    return WrittenDump(folder / "dump", mapping)


def _write_modules(folder: Path, model: str, tokens: Tokens, tape: Tape) -> WrittenDump:
    arrays = {}
    for name, own_name, layer in _selected("modules", model, 0, tape):
        path = _MODULES[own_name] if layer is None else f"model.layers.{layer}.{_MODULES[own_name]}".rstrip(".")
        arrays[path] = np.ascontiguousarray(tape[name][None])
    if model.startswith("micro-qwen"):
        save_file(arrays, folder / "hidden.safetensors")
        return WrittenDump(folder / "hidden.safetensors", tokens=tokens)
    np.savez(folder / "hidden.npz", ids=[tokens.ids], first_position=tokens.first_position, **arrays)
    return WrittenDump(folder / "hidden.npz")


def _write_nodes(folder: Path, model: str, passes: Sequence[Tokens], tapes: Sequence[Tape]) -> WrittenDump:
    config = _config(model)
    with (folder / "data.bin").open("wb") as blob, (folder / "index.jsonl").open("w") as index:

        def line(**fields: object) -> None:
            index.write(json.dumps(fields) + "\n")

        line(llorch_dump=1, engine="port", dtype="float32", kv_cache="float32")
        for n_pass, (tokens, tape) in enumerate(zip(passes, tapes, strict=True)):
            line(**{"pass": n_pass}, ids=tokens.ids, first_position=tokens.first_position)
            for name, own_name, layer in _selected("nodes", model, n_pass, tape):
                node, op = _NODES[own_name]
                op = "ADD" if own_name.endswith("_lin") and config.qkv_bias else op
                array = _interleave(tape[name], config) if own_name[:2] in ("q_", "k_") else tape[name]
                location = {"dtype": "f32", "shape": array.shape, "file": "data.bin", "offset": blob.tell()}
                line(name=node if layer is None else f"{node}-{layer}", op=op, **location)
                blob.write(array.tobytes())
    return WrittenDump(folder)


def _interleave(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Order queries or keys as llama.cpp does: for Llama, the two halves of each head alternate."""
    if config.family != "llama":
        return x
    return x.reshape(-1, 2, config.head_dim // 2).swapaxes(1, 2).reshape(x.shape)
