"""Checkpoint 13 against its stored goldens: decoding, rounding of activations, and every stage of every type.

Models are made in a temporary folder, see `quantised_models`. Each is judged twice: with its matrices decoded when they
are loaded, and packed, when they are decoded at every use.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from llorch.builtin import goldens_folder
from llorch.files import open_weights
from llorch.files.quant import BLOCK_SIZES, GGMLType, decode
from llorch.numerics import GGML
from llorch.ops.rounding import (
    BLOCK_SIZE,
    ActivationKind,
    BlockKind,
    VariantName,
    block_sums,
    quantize_blocks,
    round_activations,
)
from llorch.verify.foundation import fingerprint
from llorch.verify.quantised import BACKEND, CHECKPOINT, PRODUCER, QuantisedVerifier
from llorch.verify.quantised_goldens import CASE, FOLDER, ROUNDED_TO, QuantisedGolden, read, types
from llorch.verify.quantised_models import MODELS, write_model
from llorch.verify.verifier import Row, exact_row

BACKENDS = {BACKEND: False, f"{BACKEND}-packed": True}  # name -> whether matrices stay packed


def verify_quantised_stored() -> Iterator[Row]:
    """Judge all that checkpoint 13 compares against the stored goldens.

    Yields:
        Rows of the stages `decode.<type>`, `rounding.<type>`, `file`, and for every model its stages.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: A part of one is missing.
    """
    golden = read(goldens_folder() / FOLDER)
    yield from decode_rows(golden)
    yield from rounding_rows(golden)
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        for name in MODELS:
            path = write_model(name, Path(folder))
            yield file_row(name, path, golden)
            if fingerprint(path) == golden.files[name]:
                yield from product_rows(name, path, golden)
            path.unlink()


def decode_rows(golden: QuantisedGolden) -> Iterator[Row]:
    """Blocks of every type decode to the bits of ggml's C; only the payload of a NaN is free."""
    for kind in types():
        values = golden.blocks[f"{kind.name}.values"]
        ours = decode(golden.blocks[f"{kind.name}.blocks"], kind, values.shape)
        wrong = (ours.view(np.uint32) != values.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(values))
        yield _exact(kind.name, f"decode.{kind.name}", wrong, "values")


def rounding_rows(golden: QuantisedGolden) -> Iterator[Row]:
    """Activations are rounded to the bytes of ggml's C, in every variant that was recorded."""
    for kind in ROUNDED_TO:
        rows = golden.rounding[f"{kind}.rows"]
        for name in sorted(golden.rounding):
            if name.startswith(f"{kind}.") and name != f"{kind}.rows":
                variant: VariantName = name.split(".")[1]  # pyright: ignore[reportAssignmentType]
                wrong = packed_activations(rows, kind, variant) != golden.rounding[name]
                yield _exact(kind, f"rounding.{name}", wrong, "bytes")


def file_row(name: str, path: Path, golden: QuantisedGolden) -> Row:
    """The model that was made here is the one that the goldens come from."""
    made = fingerprint(path)
    note = f"made {made[:12]}, goldens are of {golden.files[name][:12]}: another numpy makes other random bytes"
    other = made != golden.files[name]
    return exact_row(name, CHECKPOINT, "file", PRODUCER, float(other), note if other else "", backend=BACKEND)


def product_rows(name: str, path: Path, golden: QuantisedGolden) -> Iterator[Row]:
    """Every stage of one model, isolated, chained, and after a cache; both residencies.

    Args:
        name: A key of `MODELS`.
        path: Its file.
        golden: With its trace.

    Yields:
        Rows of checkpoint 13.
    """
    weights = open_weights(path).using(GGML)
    with closing(weights.source):
        verifier = QuantisedVerifier(name, weights, {CASE: golden.case}, golden.evidence(name))
        tolerances = verifier.tolerances()
        for backend, packed in BACKENDS.items():
            verifier = verifier.on(backend)
            verifier.weights = weights.using(GGML, packed=packed)
            for row in chain(verifier.stage_rows(tolerances), verifier.decode_rows(tolerances)):
                yield replace(row, checkpoint=CHECKPOINT)


def packed_activations(rows: np.ndarray, kind: ActivationKind, variant: VariantName) -> np.ndarray:
    """Round activations to the bytes that ggml keeps.

    Args:
        rows: Float32, (rows, width).
        kind: The type, not F32.
        variant: The build of ggml.

    Returns:
        One block per row, uint8.
    """
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
    if kind == "Q8_K":
        parts.append(codes.reshape(len(codes), 16, 16).sum(axis=-1, dtype=np.int16))
    packed = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
    assert packed.shape[1] == BLOCK_SIZES[GGMLType[kind]][1]
    return packed


def _exact(model: str, stage: str, wrong: np.ndarray, of: str) -> Row:
    share = float(wrong.mean())
    note = f"{int(wrong.sum())} of {wrong.size} {of} differ, the first in block {_first(wrong)}" if share else ""
    return exact_row(model, CHECKPOINT, stage, PRODUCER, share, note, backend=BACKEND)


def _first(wrong: np.ndarray) -> int:
    return int(np.argmax(wrong.any(axis=-1)))
