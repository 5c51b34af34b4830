"""Quantised types against stored goldens (validation point 13): decoding, rounding of activations, and every stage.

The goldens are ggml's bytes and llama.cpp's stages. Models are written into a temporary folder, see `quantised_models`.
Each is compared twice: with matrices that are decoded when they are loaded, and with packed matrices that are decoded
at every use. ggml's kernels multiply packed matrices; their products are also compared with llorch's own form.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

import numpy as np

from llorch.files import Weights, open_weights
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode
from llorch.judging.compare import compare_exact, with_load_paths
from llorch.judging.expectations.files import fingerprint
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.own_form import compare_with_own_form
from llorch.judging.expectations.quantised_models import MODELS, write_model
from llorch.judging.goldens.quantised import CASE, FOLDER, ROUNDED_TO, QuantisedGolden, read, types
from llorch.judging.runner_check import RunnerCheck
from llorch.judging.runners.numpy import BY_KERNELS, GGML, GgmlRunner
from llorch.judging.types import Comparison
from llorch.ops import numerics
from llorch.ops.numerics import ProductKernels
from llorch.ops.rounding import (
    BLOCK_SIZE,
    ActivationKind,
    BlockKind,
    VariantName,
    block_sums,
    quantize_blocks,
    round_activations,
)
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import PASS
from llorch.stages.stage_ref import StageRef

BACKENDS: Mapping[ProductKernels, Mapping[str, bool]] = {  # by kernels: name -> whether matrices stay packed
    "own": {GGML: False, f"{GGML}-packed": True},
    "ggml": {BY_KERNELS: True},
}
ENGINE = "llamacpp"
CHECKPOINT = "13"


def verify_quantised_stored() -> Iterator[Comparison]:
    """Compare all quantised types with the stored goldens; raise the errors of `read`.

    The stages are `decode.<type>`, `rounding.<type>`, `file`, and the stages of every model.
    """
    yield from block_rows()
    yield from model_rows(MODELS)


def block_rows() -> Iterator[Comparison]:
    """Compare decoded blocks and rounded activations, without a model."""
    golden = read(goldens_folder() / FOLDER)
    yield from decode_rows(golden)
    yield from compare_roundings(golden)


def model_rows(names: Iterable[str], kernels: ProductKernels = "own") -> Iterator[Comparison]:
    """Write and compare some models; stages are compared only if the file equals the golden's."""
    golden = read(goldens_folder() / FOLDER)
    for name, path, comparison in write_models(golden, names):
        yield comparison
        if comparison.verdict == PASS:
            yield from stage_rows(name, path, golden, kernels)


def write_models(golden: QuantisedGolden, names: Iterable[str]) -> Iterator[tuple[str, Path, Comparison]]:
    """Write one model at a time; yield its name, its file, and the comparison of the file with the golden's file."""
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        for name in names:
            path = write_model(name, Path(folder))
            actual, expected = fingerprint(path), golden.files[name]
            mismatch = f"expected random bytes {expected[:12]}, got {actual[:12]} from another version of NumPy"
            wrong, note = (0.0, "") if actual == expected else (1.0, mismatch)
            yield name, path, _exact_row(name, StageRef(CHECKPOINT, "file"), wrong, note)
            path.unlink()


def decode_rows(golden: QuantisedGolden) -> Iterator[Comparison]:
    """Compare the bits of decoded blocks of every type with ggml's; only the bits of a NaN may differ."""
    for kind in types():
        blocks, values = (golden.blocks[f"{kind.name}.{part}"] for part in ("blocks", "values"))
        yield decode_row(kind, decode(blocks, kind, values.shape), values)


def decode_row(kind: GGMLType, actual: np.ndarray, expected: np.ndarray) -> Comparison:
    """Compare llorch's decoding of blocks with ggml's, bit by bit."""
    return _bits_row(kind.name, StageRef(CHECKPOINT, "decode", part=kind.name), wrong_bits(actual, expected), "values")


def wrong_bits(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return a mask of llorch's values whose bits differ from ggml's; two NaN count as equal."""
    return (actual.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(actual) & np.isnan(expected))


def compare_roundings(golden: QuantisedGolden) -> Iterator[Comparison]:
    """Compare rounded activations with ggml's bytes, for every recorded variant (build of ggml)."""
    for kind in ROUNDED_TO:
        rows = golden.rounding[f"{kind}.rows"]
        for variant in get_args(VariantName):
            expected = golden.rounding.get(f"{kind}.{variant}")
            if expected is not None:
                wrong = packed_activations(rows, kind, variant) != expected
                yield _bits_row(kind, StageRef(CHECKPOINT, "rounding", part=f"{kind}.{variant}"), wrong, "bytes")


def stage_rows(name: str, path: Path, golden: QuantisedGolden, kernels: ProductKernels = "own") -> Iterator[Comparison]:
    """Compare every stage of one model, isolated, chained and decode, on the backends of these kernels."""
    weights = open_weights(path).using(replace(numerics.GGML, kernels=kernels))
    with closing(weights.source):
        suite = suite_of(name, weights, golden)
        tolerances = suite.tolerances(CASE)
        for backend, packed in BACKENDS[kernels].items():
            runner = GgmlRunner(weights.using(packed=packed), {CASE: golden.traces[name]}, {CASE: tolerances}, backend)
            for comparison in with_load_paths(
                chain(RunnerCheck(suite, runner).stage_rows(), RunnerCheck(suite, runner).decode_rows()),
                suite.load_paths,
            ):
                yield replace(comparison, stage_ref=replace(comparison.stage_ref, checkpoint=CHECKPOINT))
        if kernels == "ggml":
            yield from compare_with_own_form(name, weights, golden.case, golden.traces[name], tolerances)


def suite_of(name: str, weights: Weights, golden: QuantisedGolden) -> ForwardExpectations:
    """Build the expectations of one model."""
    return ForwardExpectations(name, weights, {CASE: golden.case}, golden.engine_outputs(name), None)


def packed_activations(rows: np.ndarray, kind: ActivationKind, variant: VariantName) -> np.ndarray:
    """Round activations (rows, width) to the bytes that a build of ggml stores, one block per row, uint8."""
    if kind not in BLOCK_SIZE:
        rounded = round_activations(rows, kind, variant).reshape(-1, 1)
        if kind == "F16":
            return rounded.astype("<f2").view(np.uint8)
        return (rounded.view("<u4") >> 16).astype("<u2").view(np.uint8)
    blocks: BlockKind = kind  # pyright: ignore[reportAssignmentType]
    codes, scales = quantize_blocks(rows, blocks, variant)
    codes = codes.reshape(-1, BLOCK_SIZE[kind])
    parts = [scales.reshape(-1, 1), codes]
    if kind == "Q8_1":
        parts.insert(1, block_sums(rows, variant).astype("<f2").reshape(-1, 1))
    if kind == "Q8_K":  # which also stores the sum of every 16 codes
        parts.append(codes.reshape(len(codes), 16, 16).sum(axis=-1, dtype=np.int16))
    packed = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
    assert packed.shape[1] == BLOCK_SIZES[GGMLType[kind]][1]
    return packed


def _bits_row(model: str, stage_ref: StageRef, wrong: np.ndarray, unit: str) -> Comparison:
    """Create an exact comparison from a mask of wrong entries, with the first wrong block in the note."""
    first = int(np.argmax(wrong.any(axis=-1)))
    note = f"{int(wrong.sum())} of {wrong.size} {unit} differ, the first in block {first}" if wrong.any() else ""
    return _exact_row(model, stage_ref, float(wrong.mean()), note)


def _exact_row(model: str, stage_ref: StageRef, wrong: float, note: str) -> Comparison:
    return compare_exact(stage_ref, ENGINE, wrong, note, model=model, backend=GGML)
