"""Make the goldens of checkpoint 13: inputs that expose mistakes, and the results of ggml and llama.cpp."""

import platform
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from llorch.engines import open_engine
from llorch.files import open_weights
from llorch.files.quant import BLOCK_SIZES, GGMLType
from llorch.judging.expectations.files import fingerprint
from llorch.judging.expectations.quantised import stage_rows
from llorch.judging.expectations.quantised_models import MODELS, SCALES, random_blocks, write_model
from llorch.judging.goldens.quantised import ROUNDED_TO, QuantisedGolden, types
from llorch.judging.tolerances.forward import derive_tolerance, variances
from llorch.judging.tolerances.rounding import FREE
from llorch.ops.numerics import GGML
from llorch.ops.rounding import BLOCK_SIZE, HOST_VARIANT, ActivationKind
from llorch.stages.comparison import FAIL, Tolerance, measure
from llorch.stages.stage_ref import Pass
from llorch.stages.table import keys

IDS = (5, 17, 33, 80, 71, 42, 8, 93)  # of 96
N_RANDOM = 4
PATTERNS = (0x00, 0x55, 0xAA, 0x0F, 0xF0)
# float16 bits of scales: the smallest, a subnormal of either sign, -0, the largest, infinity, NaN
FLOAT16_EDGES = (0x0001, 0x83FF, 0x8000, 0x7BFF, 0x7C00, 0x7E00)
BYTE_EDGES = {  # types whose scales are bytes: how many, and their edges
    GGMLType.MXFP4: (1, (0x00, 0x01, 0x02, 0x7F, 0xFE)),  # 0xFF, NaN, is refused before it is decoded
    GGMLType.NVFP4: (4, (0x00, 0x01, 0x07, 0x08, 0x7E, 0x7F, 0x80, 0xFF)),
}
ELEMENT_EDGES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0x7E00, 0xFC00, 0x3C01, 0x007F, 0x7F80)


def make_quantised() -> QuantisedGolden:
    """Run the installed ggml and llama.cpp.

    Returns:
        The goldens.
    """
    blocks = {f"{kind.name}.blocks": blocks_of(kind) for kind in types()}
    golden = QuantisedGolden(
        blocks=blocks | {f"{kind.name}.values": _decoded(kind, blocks[f"{kind.name}.blocks"]) for kind in types()},
        rounding={name: array for kind in ROUNDED_TO for name, array in rounding_of(kind).items()},
        traces={},
        files={},
        case=Pass(IDS),
        provenance={
            "command": "python reference_outputs/regenerate.py quantised",
            "rounding": HOST_VARIANT,
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    )
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        for name in MODELS:
            golden = _with_model(golden, name, write_model(name, Path(folder)))
    return golden


def blocks_of(kind: GGMLType) -> np.ndarray:
    """Make random blocks, blocks of one bit pattern, and blocks with every edge case of a scale."""
    if BLOCK_SIZES[kind][0] == 1:
        edges = np.array(ELEMENT_EDGES, "<u2").view(np.uint8).reshape(-1, 2)
        return np.concatenate([random_blocks(kind, 64, key="goldens"), edges])
    patterns = np.repeat(np.array(PATTERNS, np.uint8)[:, None], BLOCK_SIZES[kind][1], axis=1)
    return np.concatenate([random_blocks(kind, N_RANDOM, key="goldens"), patterns, _edge_blocks(kind)])


def rows_of(width: int) -> np.ndarray:
    """Make activations of all sizes, between two codes, ties for the largest, zeros, and out of range."""
    draw = _Draw(width)
    ordinary = draw.signed(8, width) ** 3 * np.array([1e-3, 0.03, 1, 1, 1, 20, 300, 4e4])[:, None]
    halves = np.floor(draw.signed(6, width) * 127) + 0.5
    halves[:, 0] = 127
    halves[:, 1] = (-127, 127, 126, -126, 0.5, -0.5)  # a tie of both signs for the largest
    sizes = 2.0 ** (8 * draw.signed(512 // width, 1, 1))  # at odd sizes the last bit of the factor decides
    nearly = (halves / 127 * sizes).reshape(-1, width)
    on_edges = np.concatenate([halves, halves[:, ::-1] * -0.25, nearly, halves * 2.0**-20])
    small = draw.signed(5, width) * np.array([2.0**-14, 2.0**-24, 1e-30, 1e-38, 1e-42])[:, None]
    special = np.zeros((6, width))
    special[1] = -0.0
    special[2, 7] = -3e4
    special[3, 5] = 1e-38
    special[4] = ordinary[2]
    special[4, 3] = 1e6  # an outlier, which leaves the others a code or two
    special[5, :8] = 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -(2.0**-25), 65504, 65519, 0.1
    return np.concatenate([ordinary, on_edges, small, special]).astype(np.float32)


def rounding_of(kind: ActivationKind) -> dict[str, np.ndarray]:
    """Make rows, and round them to bytes by every variant that this build of ggml has."""
    from llorch.engines.ggml_tensor import quantize, variants

    rows = rows_of(BLOCK_SIZE.get(kind, 32))
    return {f"{kind}.rows": rows} | {f"{kind}.{v}": quantize(rows, kind, v) for v in variants(kind)}


def differences(new: QuantisedGolden, old: QuantisedGolden) -> list[str]:
    """List differences of newly made goldens from the stored ones.

    Blocks, rounding and files must be equal. On another processor, inputs of products may round to the other side of an
    edge. Each golden was compared with llorch's stages, so here only the tolerance of `all_flipped` must hold.

    Args:
        new: Made now.
        old: Read from the repository.

    Returns:
        One line for each difference.
    """
    pairs = [("case", new.case == old.case)]
    pairs += [(f"file {name}", new.files[name] == old.files[name]) for name in MODELS]
    for remade, golden in ((new.blocks, old.blocks), (new.rounding, old.rounding)):
        pairs += [(name, _same(remade.get(name), golden.get(name))) for name in sorted(remade.keys() | golden.keys())]
    lines = [f"quantised {name}: not as stored" for name, equal in pairs if not equal]
    changed = [m for m in MODELS if any(not _same(new.traces[m].get(k), a) for k, a in old.traces[m].items())]
    for model in changed:
        for name, tolerance in all_flipped(model, old).items():
            actual, expected = new.traces[model].get(name), old.traces[model][name]
            difference = measure(actual, expected, masked=name.endswith("attn_scores"))
            if not difference.within(tolerance):
                lines.append(f"quantised {model} {name}: {difference.describe()}")
    return lines


def all_flipped(model: str, golden: QuantisedGolden) -> Mapping[str, Tolerance]:
    """Return the tolerances of the stages of a free run, see `llorch.judging.tolerances.forward`."""
    trace = golden.traces[model]
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        weights = open_weights(write_model(model, Path(folder))).using(GGML)
        with closing(weights.source):
            stages = {name: stage for name, stage, _ in keys(weights.config)}
            by_stage = variances(weights, golden.case, trace)
            return {
                name: derive_tolerance(trace[name], variance[FREE] / 4, stages[name]) for name, variance in by_stage
            }  # as `ForwardTolerances.free`


class _Draw:
    """Generator of numbers from bits that NumPy promises never to change."""

    def __init__(self, key: int) -> None:
        self._bits = np.random.Philox(key=key)

    def signed(self, *shape: int) -> np.ndarray:
        """Draw numbers between -1 and 1."""
        return ((self._bits.random_raw(int(np.prod(shape))) >> 40) / 2.0**23 - 1).reshape(shape)


def _edge_blocks(kind: GGMLType) -> np.ndarray:
    if kind in BYTE_EDGES:
        count, edges = BYTE_EDGES[kind]
        blocks = random_blocks(kind, len(edges), key="edges")
        blocks[:, :count] = np.array(edges, np.uint8)[:, None]
        return blocks
    blocks = random_blocks(kind, len(FLOAT16_EDGES), key="edges")
    for scale in SCALES.get(kind, ()):
        blocks[:, scale.offset : scale.offset + 2] = np.array(FLOAT16_EDGES, "<u2").view(np.uint8).reshape(-1, 2)
    return blocks


def _decoded(kind: GGMLType, blocks: np.ndarray) -> np.ndarray:
    from llorch.engines.ggml_tensor import decode_by_ggml

    return decode_by_ggml(blocks, int(kind), len(blocks) * BLOCK_SIZES[kind][0]).reshape(len(blocks), -1)


def _with_model(golden: QuantisedGolden, name: str, path: Path) -> QuantisedGolden:
    """Add one model to the goldens.

    Raises:
        ValueError: llama.cpp's products differ from llorch's: one of the two is wrong.
    """
    with open_engine("llamacpp", path, n_threads=2, numerics=GGML) as engine:
        trace = engine.trace(golden.case.ids)
        provenance = dict(golden.provenance) | {"engines": {"llamacpp": engine.provenance()}}
    golden = replace(
        golden,
        traces={**golden.traces, name: trace},
        files={**golden.files, name: fingerprint(path)},
        provenance=provenance,
    )
    failed = [row for row in stage_rows(name, path, golden) if row.verdict == FAIL]
    if failed:
        raise ValueError(f"regenerate quantised: {len(failed)} comparisons of {name} fail, the first is {failed[0]}")
    return golden


def _same(new: np.ndarray | None, old: np.ndarray | None) -> bool:
    return new is not None and old is not None and new.dtype == old.dtype and new.tobytes() == old.tobytes()
