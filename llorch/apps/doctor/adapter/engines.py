"""The logits of an adapter in other engines, where these are installed."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from llorch.apps.doctor.health import HealthCheck
from llorch.engines.interface import unsupported_reason
from llorch.engines.process import in_child
from llorch.files import Weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.base import BaseIdentity
from llorch.lora.gguf_format import write_lora_gguf
from llorch.lora.peft_format import is_of_whole, write_peft
from llorch.lora.targets import alone
from llorch.runtime.errors import EngineDied, FormatError
from llorch.training.merge_files import LARGEST_COMPARED, logits_by, probe_ids

_PACKAGES = {"peft": ("peft", "transformers", "torch"), "llamacpp": ("llama_cpp",)}
_TITLES = {"peft": "logits in PEFT", "llamacpp": "logits in llama.cpp"}
# Largest distance from ours: of the spread of the logits, and of what the adapter does to them.
_OF_SPREAD, _OF_EFFECT, _LEAST = 1e-3, 0.05, 2e-5


def compare_engines(
    path: Path, adapter: Adapter, weights: Weights, against: tuple[str, ...] | None, report: Callable[[str], None]
) -> list[HealthCheck]:
    """Run the adapter here and in other engines, all in float32: a finding on our own logits and for each engine."""
    size = sum(int(np.prod(weights.shape(name))) for name in weights)
    engines = against if against is not None else tuple(_PACKAGES)
    if against is None and size > LARGEST_COMPARED:
        text = f"{size / 1e6:.0f} M weights take long; compare all the same with --against ENGINE"
        return [HealthCheck("engines", "logits", "absent", text)]
    ids = probe_ids(weights.config.vocab_size, adapter)
    report("logits")
    plain, beside = logits_by(weights, ids), logits_by(AdaptedWeights(weights, adapter), ids)
    found = [_effect(plain, beside)]
    for engine in engines:
        report(_TITLES[engine])
        found.append(_engine(engine, path, adapter, weights, plain, beside, ids))
    return found


def _effect(plain: np.ndarray, beside: np.ndarray) -> HealthCheck:
    """Check that an adapter changes the logits and that these are finite."""
    effect = float(np.abs(beside - plain).max())
    text = f"the adapter changes them by up to {effect:.3g}; their standard deviation is {beside.std():.3g}"
    if not np.isfinite(beside).all():
        text = "expected finite logits with the adapter, got NaN or infinity"
        return HealthCheck("engines", "logits", "broken", text)
    if not effect:
        return HealthCheck("engines", "logits", "broken", "equal to the base's: the adapter has no effect")
    return HealthCheck("engines", "logits", "ok", text)


def _engine(
    engine: str, path: Path, adapter: Adapter, weights: Weights, plain: np.ndarray, beside: np.ndarray, ids: np.ndarray
) -> HealthCheck:
    """Run an adapter in an engine, and compare its logits with llorch's."""
    if unsupported := unsupported_reason(engine, weights.config, len(ids)):
        return HealthCheck("engines", _TITLES[engine], "absent", f"no reference for this base: {unsupported}")
    missing = [package for package in _PACKAGES[engine] if find_spec(package) is None]
    if missing:
        text = f"no {', no '.join(missing)}"
        return HealthCheck("engines", _TITLES[engine], "absent", text, "pip install 'llorch[golden]'")
    try:
        with TemporaryDirectory(prefix="llorch-") as folder:
            theirs = _RUNS[engine](path, adapter, weights, ids.tolist(), Path(folder))
    except (EngineDied, FormatError) as error:
        return HealthCheck("engines", _TITLES[engine], "absent", str(error))
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        return HealthCheck("engines", _TITLES[engine], "broken", f"refused: {' '.join(str(error).split())[:300]}")
    allowed = min(_OF_SPREAD * float(beside.std()), _OF_EFFECT * float(np.abs(beside - plain).max()))
    error = float(np.abs(theirs - beside).max())
    text = f"differ from llorch's by up to {error:.3g}"
    if error <= max(allowed, _LEAST * float(np.abs(beside).max())):
        return HealthCheck("engines", _TITLES[engine], "ok", text)
    like_base = float(np.abs(theirs - plain).max())
    text = f"{text}, and from the logits without the adapter by up to {like_base:.3g}"
    return HealthCheck("engines", _TITLES[engine], "broken", text)


def _in_peft(path: Path, adapter: Adapter, weights: Weights, ids: list[int], folder: Path) -> np.ndarray:
    base = Path(weights.path)
    if not base.is_dir():  # which transformers loads as a model of text alone
        adapter = replace(adapter, targets=alone(adapter.targets))
    if not path.is_dir() or (is_of_whole(path) and not base.is_dir()):
        unknown = BaseIdentity(name="", config="", vectors="", matrices="", types=())
        write_peft(adapter, folder / "adapter", base=unknown)
        path = folder / "adapter"
    return in_child("transformers", base, "llorch.engines.peft:peft_logits", base, path, ids)


def _in_llamacpp(path: Path, adapter: Adapter, weights: Weights, ids: list[int], folder: Path) -> np.ndarray:
    write_lora_gguf(adapter, folder / "adapter.gguf", weights.config)  # also where it is one: refuses what kills it
    path, base = folder / "adapter.gguf" if path.is_dir() else path, Path(weights.path)
    return in_child("llamacpp", base, "llorch.engines.llamacpp:logits_with_adapter", base, path, ids)


_RUNS: dict[str, Callable[[Path, Adapter, Weights, list[int], Path], np.ndarray]] = {
    "peft": _in_peft,
    "llamacpp": _in_llamacpp,
}
