"""The ways in which the torch path runs, each judged as a backend: the page itself, and what replaces its leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llorch.files import Weights
from llorch.pytorch.device import Target
from llorch.pytorch.load import load_dense
from llorch.pytorch.memory import require_memory
from llorch.pytorch.model import TorchModel, load_torch
from llorch.pytorch.packing import PACKERS
from llorch.verify.truth import SCORES


@dataclass(frozen=True)
class Variant:
    """One way to run the modules, judged as a backend of its own.

    Attributes:
        make: Loads the model.
        hidden: Stages that its leaves do not show.
        in_batch: Whether the judged tokens run beside others, with padding.
    """

    make: Callable[[Weights, Target], TorchModel]
    hidden: frozenset[str] = SCORES
    in_batch: bool = False


def plain(weights: Weights, target: Target) -> TorchModel:
    """The page as it is written."""
    require_memory(weights, target, "decoded")
    return TorchModel(weights, target, load_dense(weights, dtype=target.dtype, device=target.device))


def with_sdpa(weights: Weights, target: Target) -> TorchModel:
    """The page with fused attention, nothing else."""
    from llorch.pytorch.sdpa import use_sdpa

    model = plain(weights, target)
    use_sdpa(model.module)
    return model


def loaded(**how: Any) -> Callable[[Weights, Target], TorchModel]:
    """What `load_torch` gives users: the fastest leaves that there are, on CUDA with recorded steps."""
    how = {"residency": "decoded"} | how
    return lambda weights, target: load_torch(weights.path, device=str(target.device), dtype=target.dtype_name, **how)


VARIANTS: Mapping[str, Variant] = {  # suffix of the backend's name
    "": Variant(plain, hidden=frozenset()),
    "-batch": Variant(plain, hidden=frozenset(), in_batch=True),
    "-sdpa": Variant(with_sdpa),
    "-sdpa-batch": Variant(with_sdpa, in_batch=True),
    "-fast": Variant(loaded()),
    "-fast-batch": Variant(loaded(), in_batch=True),
    "-reproducible": Variant(loaded(mode="reproducible"), hidden=frozenset()),
    "-compiled": Variant(loaded(compiled=True)),
    "-packed": Variant(loaded(residency="packed")),
}


def backends(target: Target, weights: Weights | None = None) -> list[str]:
    """Names of all that is judged on a target.

    Args:
        target: Device and dtype.
        weights: Whose matrices are judged packed too, where they are of a type that can be.

    Returns:
        One name per variant, as in the rows; compiled ones on CUDA only, because nothing runs compiled on the CPU.
    """
    packed = weights is not None and any(weights.stored_type(name) in PACKERS for name in weights)
    left_out = {"-compiled": target.device.type != "cuda", "-packed": not packed}
    return [f"{target}{suffix}" for suffix in VARIANTS if not left_out.get(suffix, False)]
