"""The goldens of checkpoint 13: what ggml's C functions make of blocks and activations, llama.cpp's stages of models.

The file `blocks` holds blocks of every type beside their decoded numbers, `rounding` rows of activations beside the
bytes that they are rounded to, `<model>` every stage of one of the models in `quantised_models`.
There is no tolerance among them: all are derived, see `tolerances`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llorch.engines import stored_load_path
from llorch.files.quant import GGMLType
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.goldens.forward import EngineOutput
from llorch.judging.goldens.store import Arrays, GoldenStore, refused
from llorch.stages.stage_ref import Pass

FOLDER = "quantised"
CASE = "near"
ROUNDED_TO = ("F16", "BF16", "Q8_0", "Q8_1", "Q8_K")


@dataclass(frozen=True)
class QuantisedGolden:
    """The stored goldens.

    Attributes:
        blocks: `<type>.blocks` (uint8, one block per row) and `<type>.values` (float32).
        rounding: `<type>.rows` (float32) and `<type>.<variant>` (uint8, one block per row).
        traces: Model to its stages.
        files: Model to the `fingerprint` of its file.
        case: The tokens of all models.
        provenance: Where all this comes from.
    """

    blocks: Arrays
    rounding: Arrays
    traces: Mapping[str, Arrays]
    files: Mapping[str, str]
    case: Pass
    provenance: Mapping[str, object]

    def engine_outputs(self, model: str) -> dict[str, EngineOutput]:
        """Return the engine output that a verifier is given for one model."""
        none, load_path = np.empty(0), stored_load_path(self.provenance, "llamacpp")
        traces = {CASE: self.traces[model]}
        return {"llamacpp": EngineOutput(traces, none, probabilities={}, greedy=none, load_path=load_path)}


def types() -> list[GGMLType]:
    """List all matrix types of the models, in the order of their first use."""
    return list(dict.fromkeys(kind for recipe in MODELS.values() for kind in sorted(recipe.types)))


def save(folder: Path, golden: QuantisedGolden) -> None:
    """Write goldens; the same content gives the same bytes."""
    record = {"case": asdict(golden.case), "files": golden.files, "provenance": golden.provenance}
    GoldenStore(folder).write(record, {"blocks": golden.blocks, "rounding": golden.rounding, **golden.traces})


def read(folder: Path) -> QuantisedGolden:
    """Read what `save` wrote. A missing golden is a failure, never a pass.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A part of one is missing.
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
    wanted = {f"{kind.name}.{part}" for kind in types() for part in ("blocks", "values")}
    missing = sorted(
        MODELS.keys() - record["files"].keys()
        | wanted - blocks.keys()
        | {f"{kind}.rows" for kind in ROUNDED_TO} - rounding.keys()
    )
    if missing:
        message = f"expected every model, type and rounding, missing: {', '.join(missing[:5])}"
        raise refused(folder, message)
