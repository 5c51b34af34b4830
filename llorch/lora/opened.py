"""Adapters beside a model that is open: read, checked against its base, and known by name."""

import re
from pathlib import Path

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.lora.files import check_base, read_adapter
from llorch.lora.targets import targets_of


def adapter_for(weights: Weights, adapter: Adapter | str | Path, *, any_base: bool) -> tuple[Adapter, str]:
    """An adapter that may stand beside some weights, and what is known of its base in a sentence.

    Where the adapter records its base every tensor of the weights is read once; of one in memory nothing more is known.
    """
    if isinstance(adapter, Adapter):
        return adapter, "base: unknown, the adapter does not come from a file"
    verdict = check_base(adapter, weights, any_base=any_base)
    return read_adapter(adapter, weights.config), verdict


def require_free(name: str, known: list[str]) -> None:
    """Refuse (ValueError) a name that is in use, or has other signs than letters, digits, _ and -."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"adapter: expected a name of letters, digits, _ and -, got {name!r}")
    if name in known:
        raise ValueError(f"adapter: there is one called {name!r} already; remove it or choose another name")


def require_known(name: str | None, known: list[str]) -> None:
    """Refuse (ValueError) the name of an adapter that is not there; None wants none."""
    if name is not None and name not in known:
        raise ValueError(f"adapter: there is none called {name!r}; there are {', '.join(known) or 'none'}")


def require_fits(name: str, adapter: Adapter, model: ModelConfig) -> None:
    """Refuse (ValueError) an adapter of which a matrix has another name or shape in this model."""
    every = targets_of(model)
    foreign = [target.name for target in adapter.targets.values() if every.get(target.name) != target]
    if foreign:
        what = ", ".join(foreign)
        raise ValueError(f"adapter {name!r}: made for another model, which has other names or shapes for {what}")
