"""Goldens of quantised types (validation point 13): ggml's decoded blocks and rounded activations, llama.cpp's stages.

The file `blocks` holds blocks of every type and their decoded numbers. `rounding` holds rows of activations and the
bytes to which ggml rounds them. `<model>` holds every stage of one of the models in `quantised_models`. Tolerances are
not stored: `tolerances` derives them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.engines import stored_load_path
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.goldens.forward import EngineOutput
from llorch.judging.goldens.store import Arrays, GoldenStore, golden_error
from llorch.stages.stage_ref import Pass

FOLDER = "quantised"
CASE = "near"
ROUNDED_TO = ("F16", "BF16", "Q8_0", "Q8_1", "Q8_K")


@dataclass(frozen=True)
class QuantisedGolden:
    """Stored goldens of all quantised types.

    Attributes:
        blocks: `<type>.blocks` (uint8, one block per row) and `<type>.values` (float32).
        rounding: `<type>.rows` (float32 activations) and `<type>.<build of ggml>` (uint8, one block per row).
        traces: Stages of each model.
        files: `expectations.files.fingerprint` of each model's file.
        case: Input tokens, equal for all models.
        provenance: Versions of the engines and libraries.
    """

    blocks: Arrays
    rounding: Arrays
    traces: Mapping[str, Arrays]
    files: Mapping[str, str]
    case: Pass
    provenance: Mapping[str, object]

    def engine_outputs(self, model: str) -> dict[str, EngineOutput]:
        """Return the stored engine output of one model."""
        no_array, load_path = np.empty(0), stored_load_path(self.provenance, "llamacpp")
        traces = {CASE: self.traces[model]}
        return {"llamacpp": EngineOutput(traces, no_array, probabilities={}, greedy=no_array, load_path=load_path)}


def types() -> list[GGMLType]:
    """List all matrix types of the models, in the order of their first use."""
    return list(dict.fromkeys(kind for recipe in MODELS.values() for kind in sorted(recipe.types)))


def save(folder: Path, golden: QuantisedGolden) -> None:
    """Write goldens; the same content gives the same bytes."""
    record = {"case": asdict(golden.case), "files": golden.files, "provenance": golden.provenance}
    GoldenStore(folder).write(record, {"blocks": golden.blocks, "rounding": golden.rounding, **golden.traces})


def read(folder: Path) -> QuantisedGolden:
    """Read the goldens that `save` wrote. A missing golden is a failure, never a pass.

    Raises:
        FileNotFoundError: A file is missing.
        UserError: A part of a file is missing.
    """
    store = GoldenStore(folder)
    record = store.record()
    blocks, rounding, *traces = store.arrays(("blocks", "rounding", *MODELS)).values()
    _require_complete(folder, record, blocks, rounding)
    return QuantisedGolden(
        blocks=blocks,
        rounding=rounding,
        traces=dict(zip(MODELS, traces, strict=True)),
        files=record["files"],
        case=Pass(tuple(record["case"]["ids"]), record["case"]["first_position"]),
        provenance=record["provenance"],
    )


def _require_complete(folder: Path, record: Mapping, blocks: Arrays, rounding: Arrays) -> None:
    expected = {f"{kind.name}.{part}" for kind in types() for part in ("blocks", "values")}
    missing = sorted(
        MODELS.keys() - record["files"].keys()
        | expected - blocks.keys()
        | {f"{kind}.rows" for kind in ROUNDED_TO} - rounding.keys()
    )
    if missing:
        message = f"expected every model, type and rounding, missing: {', '.join(missing[:5])}"
        raise golden_error(folder, message)
