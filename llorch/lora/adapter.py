"""An adapter as arrays: what every file format is read into and written from.

lora_A (r, in)   lora_B (out, r)   of an embedding: in = vocabulary, out = hidden_size
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from llorch.config import ModelConfig
from llorch.errors import FormatError
from llorch.lora.config import LoraConfig
from llorch.lora.targets import Target

LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "magnitude"


@dataclass(frozen=True)
class LoraTensors:
    """The trained tensors of one matrix; always float32, whatever the base is."""

    lora_A: Float32[np.ndarray, "r in"]
    lora_B: Float32[np.ndarray, "out r"]
    magnitude: Float32[np.ndarray, " out"] | None = None  # of DoRA

    def arrays(self) -> dict[str, np.ndarray]:
        """Those that exist, under their names."""
        found = {LORA_A: self.lora_A, LORA_B: self.lora_B, MAGNITUDE: self.magnitude}
        return {name: array for name, array in found.items() if array is not None}


@dataclass(frozen=True)
class Adapter:
    """One adapter; see `checked`."""

    config: LoraConfig
    targets: Mapping[str, Target]  # by canonical name, in the order of the forward pass
    tensors: Mapping[str, LoraTensors]  # the same names

    @property
    def n_parameters(self) -> int:
        """Trained numbers."""
        return sum(array.size for tensors in self.tensors.values() for array in tensors.arrays().values())

    def scaling(self, name: str) -> float:
        """What the product of one matrix's adapter is multiplied with."""
        return self.config.scaling_of(self.targets[name])

    def flat(self) -> dict[str, np.ndarray]:
        """Every trained tensor under one name: `layers.3.q_proj.lora_A`."""
        return {f"{name}.{kind}": a for name, tensors in self.tensors.items() for kind, a in tensors.arrays().items()}


def checked(
    config: LoraConfig, tensors: Mapping[str, LoraTensors], model: ModelConfig, *, where: object = None
) -> Adapter:
    """Put an adapter together if its tensors, by canonical name, are those its configuration asks for.

    Else a FormatError, Missing, Unexpected, Shape or NonFinite, names every tensor concerned.
    """
    path = None if where is None else str(where)
    try:
        targets = config.targets(model)
    except ValueError as error:
        raise FormatError("Missing", str(error), path=path) from None
    for code, names in (("Missing", targets.keys() - tensors.keys()), ("Unexpected", tensors.keys() - targets.keys())):
        if names:
            message = (
                f"adapter: expected tensors for {len(targets)} matrices, {code.lower()}: {', '.join(sorted(names))}"
            )
            raise FormatError("Missing" if code == "Missing" else "Unexpected", message, path=path)
    faults = [f for name, target in targets.items() for f in _shape_faults(config, target, tensors[name])]
    if faults:
        raise FormatError("Shape", f"adapter: {'; '.join(faults)}", path=path)
    bad = [f"{n}.{k}" for n, t in tensors.items() for k, array in t.arrays().items() if not np.isfinite(array).all()]
    if bad:
        raise FormatError("NonFinite", f"adapter: NaN or infinity in {', '.join(sorted(bad))}", path=path)
    return Adapter(config, targets, {name: tensors[name] for name in targets})


def _shape_faults(config: LoraConfig, target: Target, tensors: LoraTensors) -> list[str]:
    rank = config.rank_of(target)
    want: dict[str, tuple[int, ...]] = {LORA_A: (rank, target.n_in), LORA_B: (target.n_out, rank)}
    if config.use_dora:
        want[MAGNITUDE] = (target.n_out,)
    got = {kind: array.shape for kind, array in tensors.arrays().items()}
    return [
        f"{target.name}.{kind} expected {want.get(kind, 'none')}, got {got.get(kind, 'none')}"
        for kind in sorted(want.keys() | got.keys())
        if want.get(kind) != got.get(kind)
    ]
