"""Engines that read a quantised folder, most of them wrongly: the corpus's port with matrices of other readers.

`folder_readers` reads the folders of `reference_outputs/quantised_folders` from the descriptions of their formats. No
reader was written from llorch's known mistakes. `names` are the known mistakes that the bug is; empty: unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import folder_readers as read
from benchmarks.diagnosis import roundings as to
from benchmarks.diagnosis.cases import NOTICED, ROUNDED, CorrectDiagnosis, farthest_token
from benchmarks.diagnosis.folder_readers import Folder, Matrices, opened
from benchmarks.diagnosis.port import MATRICES, Port
from benchmarks.diagnosis.styles import Tape, WrittenDump, list_dumped_keys, stage_keys, write
from llorch.runtime.builtin import goldens_folder
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import forward_order, key

PASSES = (Tokens((3, 11, 7, 20, 5, 9, 15, 22, 13), 0), Tokens((8,), 9), Tokens((17,), 10))
_STAGES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out", "g": "ffn_gate", "u": "ffn_up", "d": "ffn_out"}
_SELF = {"q_proj", "k_proj", "v_proj", "o_proj"}
Reader = Callable[[Folder], Matrices]


@dataclass(frozen=True)
class FolderCase:
    """Engine on a quantised folder.

    Attributes:
        name: Name of the bug, or of the right engine.
        folder: Name of the folder that it reads.
        wrong: Reader with the bug; None for a right engine.
        names: Known mistakes that the bug is.
        style: Style of the dump.
        change: Change of the port in a right engine.
        declared: Facts that it declares.
    """

    name: str
    folder: str
    wrong: Reader | None = None
    names: tuple[str, ...] = ()
    style: str = "all"
    change: Callable[[Port], object] = lambda port: None
    declared: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Path of the folder."""
        return str(folder_of(self.folder))


RIGHT: Mapping[str, Reader] = {  # by the start of a folder's name
    "gptq": read.gptq, "awq": read.awq, "ct-nvfp4": read.nvfp4, "ct-mxfp4": read.mxfp4, "ct": read.packed,
    "fp8": read.fp8, "modelopt-nvfp4": read.nvfp4, "bnb": read.bitsandbytes, "mlx": read.mlx,
}  # fmt: skip


def folder_of(name: str) -> Path:
    """Return the path of a folder."""
    return goldens_folder() / "quantised_folders" / name


@cache
def right_matrices(name: str) -> Matrices:
    """Read a folder correctly."""
    reader = next(reader for start, reader in RIGHT.items() if name.startswith(start))
    return reader(opened(folder_of(name)))


def run(case: FolderCase, *, right: bool = False) -> Sequence[Tape]:
    """Run the port on the matrices of a reader, in float32."""
    port = Port(case.model)
    matrices = right_matrices(case.folder)
    if case.wrong is not None and not right:
        matrices = case.wrong(opened(folder_of(case.folder)))
    for name, matrix in matrices.items():
        _put(port, name, matrix.astype(np.float32))
    case.change(port)
    with np.errstate(all="ignore"):  # wrong scales may overflow, as in C
        for tokens in PASSES:
            port.run(tokens.ids)
    return port.tape


def _put(port: Port, name: str, matrix: np.ndarray) -> None:
    if name == "model.embed_tokens.weight":
        port.top["tok"] = matrix
    elif name == "lm_head.weight":
        port.top["lg"] = matrix
    else:
        port.layers[int(name.split(".")[2])][MATRICES[name.split(".")[-2]]] = matrix


def write_case(case: FolderCase, folder: Path) -> WrittenDump:
    """Write the dump of a case into an empty folder."""
    return write(case.style, folder, case.model, PASSES, run(case))


def correct_diagnosis_of_folder(case: FolderCase) -> CorrectDiagnosis:
    """Return where the bug shows first, and the products in which it acts."""
    threshold = ROUNDED if case.style == "all" else NOTICED
    with np.errstate(all="ignore"):
        shows = tuple(_first_shown(case, run(case), run(case, right=True), threshold))
    assert case.wrong is not None
    wrong, matrices = case.wrong(opened(folder_of(case.folder))), right_matrices(case.folder)
    stage_refs = [
        _stage(name)
        for name, matrix in wrong.items()
        if name not in matrices or not np.allclose(matrix, matrices[name], rtol=1e-7, atol=0)
    ]
    return CorrectDiagnosis(shows, tuple(stage_refs), 0, case.names)


def _stage(name: str) -> str:
    if not name.startswith("model.layers."):
        return "embed" if "embed" in name else "logits"
    return key(_STAGES[MATRICES[name.split(".")[-2]]], int(name.split(".")[2]))


def _first_shown(
    case: FolderCase, actual: Sequence[Tape], right: Sequence[Tape], threshold: float
) -> list[tuple[int, str]]:
    places: list[tuple[int, str]] = []
    for n_pass, (tape, right_tape) in enumerate(zip(actual, right, strict=True)):
        arrays, right_arrays = stage_keys(tape), stage_keys(right_tape)
        for name in forward_order(list_dumped_keys(case.style, case.model, n_pass, tape)):
            distance = farthest_token(name, arrays[name], right_arrays[name])
            places += [(n_pass, name)] if distance else []
            if distance > threshold:
                return places
    return []


def _bf16(x: np.ndarray) -> np.ndarray:
    return to.bf16(np.ascontiguousarray(x, np.float32))


def _half_weights(rounded: Callable[[np.ndarray], np.ndarray]) -> Callable[[Port], object]:
    """Hold matrices in half precision, like kernels that dequantise to it."""

    def change(port: Port) -> None:
        for layer in port.layers:
            layer |= {name: rounded(array) if name in MATRICES.values() else array for name, array in layer.items()}

    return change


def _with_head(reader: Reader, kind: str) -> Reader:
    return lambda folder: read.with_quantised_head(folder, reader, kind)


_HEAD = ("left-alone-module-quantised",)
_FP4 = np.array([0, 0.0052083333, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25])
_FP4 = np.concatenate([_FP4, -_FP4])
_ODD_FIRST = np.argsort(read.AWQ_COLUMNS).tolist()
FOLDER_CASES: tuple[FolderCase, ...] = (
    FolderCase("gptq without the one of version 1", "gptq-4bit", partial(read.gptq, added=0),
               ("gptq-first-version-as-second",)),
    FolderCase("gptq_v2 with the one of version 1", "gptq-v2-4bit-asym-act-order", partial(read.gptq, added=1),
               ("gptq-second-version-as-first", "gptq-zero-point-not-wrapped")),
    FolderCase("gptq zero point 16", "gptq-4bit-asym", partial(read.gptq, wraps=False),
               ("gptq-zero-point-not-wrapped",), "modules"),
    FolderCase("gptq one added to whole words", "gptq-4bit-asym", partial(read.gptq, words=True),
               ("gptq-zero-point-carried",)),
    FolderCase("gptq g_idx ignored", "gptq-4bit-act-order", partial(read.gptq, sorted_groups=True),
               ("group-index-ignored",), "modules"),
    FolderCase("gptq read in AWQ's order", "gptq-4bit", partial(read.gptq, columns=_ODD_FIRST), ("gptq-awq-order",)),
    FolderCase("gptq codes as signed integers", "gptq-8bit", partial(read.gptq, signed=True), ("folder-codes-signed",)),
    FolderCase("gptq 3 bits without the one", "gptq-3bit-asym", partial(read.gptq, added=0),
               ("gptq-first-version-as-second",)),
    FolderCase("awq in plain order", "awq-gemm", partial(read.awq, columns=list(range(8))), ("awq-plain-order",)),
    FolderCase("awq in the inverse order", "awq-gemm", partial(read.awq, columns=_ODD_FIRST), style="modules"),
    FolderCase("awq zero points plus one", "awq-gemm", partial(read.awq, added=1), ("awq-zero-point-plus-one",)),
    FolderCase("awq zero points less one", "awq-gemm", partial(read.awq, added=-1)),
    FolderCase("awq as symmetric", "awq-gemm", partial(read.awq, middle=True), ("folder-read-as-symmetric",)),
    FolderCase("awq offsets in float16", "awq-gemm", partial(read.awq, rounded=True), ("zero-point-product-float16",)),
    FolderCase("pack-quantized without the middle", "ct-w4a16", partial(read.packed, middle=False),
               ("folder-zero-point-forgotten",)),
    FolderCase("pack-quantized as two's complement", "ct-w4a16", partial(read.packed, signed=True),
               ("folder-codes-signed",), "modules"),
    FolderCase("pack-quantized zero points ignored", "ct-w4a16-asym", partial(read.packed, zeros_by_row=False),
               ("folder-read-as-symmetric",)),
    FolderCase("ten codes in a word read densely", "ct-w3a16-ten-per-word", partial(read.packed, dense=True),
               ("three-bits-without-gaps",)),
    FolderCase("weight_scale_inv divided", "fp8-block-partial", partial(read.fp8, divides=True),
               ("fp8-scale-divided",)),
    FolderCase("block size from the number of scales", "fp8-block-partial", partial(read.fp8, equal=True),
               ("fp8-blocks-of-equal-size",), "modules"),
    FolderCase("scales of blocks tiled", "fp8-block-bf16-scale", partial(read.fp8, tiled=True), ("fp8-scales-tiled",)),
    FolderCase("one scale of all blocks", "fp8-block-partial", partial(read.fp8, single_scale=True),
               ("fp8-partial-block-with-scale-before",)),
    FolderCase("scales in bfloat16", "fp8-block-partial", partial(read.fp8, dtype=_bf16), ("folder-scale-bfloat16",)),
    FolderCase("nvfp4 global scale multiplied", "ct-nvfp4", partial(read.nvfp4, multiplies=True),
               ("global-scale-turned",)),
    FolderCase("nvfp4 of ModelOpt divided", "modelopt-nvfp4", partial(read.nvfp4, multiplies=False),
               ("global-scale-turned",)),
    FolderCase("nvfp4 without the global scale", "ct-nvfp4", partial(read.nvfp4, with_global_scale=False),
               ("global-scale-dropped",), "modules"),
    FolderCase("nvfp4 upper half first", "ct-nvfp4", partial(read.nvfp4, upper_first=True),
               ("folder-upper-half-first",)),
    FolderCase("nvfp4 scales as integers", "modelopt-nvfp4", partial(read.nvfp4, integers=True)),
    FolderCase("mxfp4 bias 128", "ct-mxfp4", partial(read.mxfp4, bias=128), ("exponent-bias-128",)),
    FolderCase("mxfp4 exponents as signed bytes", "ct-mxfp4", partial(read.mxfp4, signed=True)),
    FolderCase("mxfp4 upper half first", "ct-mxfp4", partial(read.mxfp4, upper_first=True),
               ("folder-upper-half-first",), "modules"),
    FolderCase("nf4 lower half first", "bnb-nf4", partial(read.bitsandbytes, lower_first=True),
               ("bitsandbytes-lower-half-first",)),
    FolderCase("nf4 without the nested offset", "bnb-nf4-double", partial(read.bitsandbytes, offset=False),
               ("nested-offset-dropped",)),
    FolderCase("nf4 by the table of FP4", "bnb-nf4",
               partial(read.bitsandbytes, table=_FP4), ("nf4-as-fp4",), "modules"),
    FolderCase("nf4 nested blocks of 64", "bnb-nf4-double", partial(read.bitsandbytes, nested_size=64)),
    FolderCase("int8 by 128", "bnb-int8", partial(read.bitsandbytes, divisor=128.0), ("int8-row-maximum-over-128",)),
    FolderCase("int8 by 127.5", "bnb-int8", partial(read.bitsandbytes, divisor=127.5),
               ("int8-row-maximum-over-127-5",), "modules"),
    FolderCase("mlx without biases", "mlx-4bit", partial(read.mlx, biases=0.0), ("mlx-bias-dropped",)),
    FolderCase("mlx biases subtracted", "mlx-3bit", partial(read.mlx, biases=-1.0), ("mlx-bias-subtracted",)),
    FolderCase("mlx upper half first", "mlx-4bit", partial(read.mlx, upper_first=True), ("folder-upper-half-first",)),
    FolderCase("output matrix in nf4", "bnb-nf4-double", _with_head(read.bitsandbytes, "nf4"), _HEAD),
    FolderCase("output matrix in int8", "bnb-int8", _with_head(read.bitsandbytes, "int8"), _HEAD, "modules"),
    FolderCase("output matrix in 4 bits", "ct-w4a16", _with_head(read.packed, "int4"), _HEAD),
    *(FolderCase("right reader", name) for name in (
        "gptq-4bit-act-order", "gptq-4bit-asym", "awq-gemm", "fp8-block-partial", "ct-w3a16-ten-per-word", "ct-nvfp4",
        "ct-mxfp4", "bnb-nf4-double", "bnb-int8", "mlx-3bit")),
    FolderCase("right reader of modules", "ct-w4a16-asym", style="modules"),
    FolderCase("matrices dequantised to float16", "gptq-4bit", change=_half_weights(to.f16)),
    FolderCase("matrices dequantised to bfloat16", "awq-gemm", change=_half_weights(to.bf16)),
)  # fmt: skip
