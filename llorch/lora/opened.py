"""Adapters beside a model that is open: read, checked against its base, and known by name."""

import re
from pathlib import Path

from llorch.config import ModelConfig
from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.lora.files import check_base, read_adapter
from llorch.lora.targets import targets_of


def adapter_for(weights: Weights, adapter: Adapter | str | Path, *, any_base: bool) -> tuple[Adapter, str]:
    """An adapter that may stand beside some weights.

    Args:
        weights: The base; where the adapter records the base that it was made for, every tensor is read once.
        adapter: One in memory, of which nothing more is known, a PEFT directory or a LoRA GGUF file.
        any_base: Take one that was made for another base of the same shapes.

    Returns:
        The adapter, and what is known of its base in a sentence.

    Raises:
        FileNotFoundError: Nothing has this path.
        FormatError: The adapter cannot be used with a model of these shapes, or BaseMismatch.
    """
    if isinstance(adapter, Adapter):
        return adapter, "base: unknown, the adapter does not come from a file"
    verdict = check_base(adapter, weights, any_base=any_base)
    return read_adapter(adapter, weights.config), verdict


def require_free(name: str, known: list[str]) -> None:
    """Refuse a name that a new adapter cannot have.

    Args:
        name: Which is wanted.
        known: Names that are in use.

    Raises:
        ValueError: It is in use, or has other signs than letters, digits, _ and -.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"adapter: expected a name of letters, digits, _ and -, got {name!r}")
    if name in known:
        raise ValueError(f"adapter: there is one called {name!r} already; remove it or choose another name")


def require_known(name: str | None, known: list[str]) -> None:
    """Refuse the name of an adapter that is not there.

    Args:
        name: Which is wanted; None wants none.
        known: Names that there are.

    Raises:
        ValueError: It is not among them.
    """
    if name is not None and name not in known:
        raise ValueError(f"adapter: there is none called {name!r}; there are {', '.join(known) or 'none'}")


def require_fits(name: str, adapter: Adapter, model: ModelConfig) -> None:
    """Refuse an adapter for a model of other shapes.

    Args:
        name: Of the adapter.
        adapter: What was made.
        model: What it is to stand beside.

    Raises:
        ValueError: A matrix has another name or shape here.
    """
    every = targets_of(model)
    foreign = [target.name for target in adapter.targets.values() if every.get(target.name) != target]
    if foreign:
        what = ", ".join(foreign)
        raise ValueError(f"adapter {name!r}: made for another model, which has other names or shapes for {what}")
