"""The goldens of checkpoint 13 as the situations that its tests of teeth go through."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from llorch.builtin import goldens_folder
from llorch.comparison import EXACT, Tolerance
from llorch.diagnosis.mistakes import Mistake, QuantisedInputs
from llorch.diagnosis.mistakes.variants import Variants, quantised_variants
from llorch.files import open_weights
from llorch.files.quant import ACTIVATION_TYPE, BLOCK_SIZES, GGMLType, decode
from llorch.ops.rounding import VariantName
from llorch.verify.expectations.quantised_goldens import FOLDER, QuantisedGolden, read
from llorch.verify.expectations.quantised_models import write_model
from llorch.verify.tolerances.forward import WORST

PRODUCT = Tolerance(1e-6, WORST * 1e-6)  # the largest that a product alone is granted
N_ORDINARY = 4  # blocks before those with edge cases, whose sizes would hide the others'


@cache
def golden() -> QuantisedGolden:
    return read(goldens_folder() / FOLDER)


@cache
def variant() -> VariantName:
    """The build of ggml that the goldens were made with."""
    return golden().provenance["rounding"]  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class QuantisedSituation:
    """One step of a product with a matrix of one type."""

    step: str
    kind: GGMLType

    @property
    def tolerance(self) -> Tolerance:
        return PRODUCT if self.step == "product" else EXACT

    @cache  # noqa: B019 (situations are few and equal ones share the entry)
    def shown(self) -> tuple[QuantisedInputs, np.ndarray]:
        """The inputs of the step, and what ggml made of them."""
        return {"decode": _blocks, "rounding": _activations, "product": _product}[self.step](self.kind)

    @cache  # noqa: B019
    def made(self) -> Variants:
        return quantised_variants(self.step, self.shown()[0])


def situations(mistake: Mistake) -> Iterator[QuantisedSituation]:
    """Wherever a mistake has to show: every step and type."""
    for step in mistake.stages:
        for case in mistake.cases:
            yield QuantisedSituation(step, GGMLType[case])


def _blocks(kind: GGMLType) -> tuple[QuantisedInputs, np.ndarray]:
    blocks, values = (golden().blocks[f"{kind.name}.{part}"][:N_ORDINARY] for part in ("blocks", "values"))
    return QuantisedInputs(kind, blocks, values.shape, np.empty((0, 0), np.float32), variant()), values


def _activations(kind: GGMLType) -> tuple[QuantisedInputs, np.ndarray]:
    name = ACTIVATION_TYPE[kind]
    rows = golden().rounding[f"{name}.rows"]
    want = decode(golden().rounding[f"{name}.{variant()}"], GGMLType[name], rows.shape)
    finite = np.isfinite(want).all(axis=1)
    return QuantisedInputs(kind, np.empty((0, 0), np.uint8), (0, 0), rows[finite], variant()), want[finite]


def _product(kind: GGMLType) -> tuple[QuantisedInputs, np.ndarray]:
    trace = golden().traces[kind.name]
    with tempfile.TemporaryDirectory() as folder:
        weights = open_weights(write_model(kind.name, Path(folder)))
        packed = weights.source.packed("blk.0.ffn_gate.weight")
        blocks = packed.raw.reshape(-1, BLOCK_SIZES[kind][1]).copy()
        weights.source.close()
    return QuantisedInputs(kind, blocks, packed.shape, trace["l0.ffn_norm"], variant()), trace["l0.ffn_gate"]
