"""Comparison of llorch's logits with an adapter and those of PEFT and llama.cpp, if they are installed."""

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
from llorch.lora.peft_format import has_multimodal_names, write_peft
from llorch.lora.targets import alone
from llorch.runtime.errors import EngineDied, FormatError
from llorch.training.merge_files import LARGEST_COMPARED, logits_by, probe_ids

_PACKAGES = {"peft": ("peft", "transformers", "torch"), "llamacpp": ("llama_cpp",)}
_TITLES = {"peft": "logits in PEFT", "llamacpp": "logits in llama.cpp"}
# Tolerance: the less of shares of the logits' standard deviation and the adapter's effect; at least of the top logit.
_SPREAD, _EFFECT, _ROUNDING = 1e-3, 0.05, 2e-5


def compare_engines(
    path: Path, adapter: Adapter, weights: Weights, against: tuple[str, ...] | None, report: Callable[[str], None]
) -> list[HealthCheck]:
    """Run the adapter in llorch and in other engines, in float32; return one check for llorch and one per engine."""
    size = sum(int(np.prod(weights.shape(name))) for name in weights)
    engines = against if against is not None else tuple(_PACKAGES)
    if against is None and size > LARGEST_COMPARED:
        text = f"{size / 1e6:.0f} M weights take long; compare all the same with --against ENGINE"
        return [HealthCheck("engines", "logits", "absent", text)]
    ids = probe_ids(weights.config.vocab_size, adapter)
    report("logits")
    base_logits, adapter_logits = logits_by(weights, ids), logits_by(AdaptedWeights(weights, adapter), ids)
    checks = [_check_effect(base_logits, adapter_logits)]
    for engine in engines:
        report(_TITLES[engine])
        checks.append(_check_engine(engine, path, adapter, weights, base_logits, adapter_logits, ids))
    return checks


def _check_effect(base: np.ndarray, adapted: np.ndarray) -> HealthCheck:
    """Check that llorch's logits with the adapter are finite and differ from the base's."""
    effect = float(np.abs(adapted - base).max())
    text = f"the adapter changes them by up to {effect:.3g}; their standard deviation is {adapted.std():.3g}"
    if not np.isfinite(adapted).all():
        text = "expected finite logits with the adapter, got NaN or infinity"
        return HealthCheck("engines", "logits", "broken", text)
    if not effect:
        return HealthCheck("engines", "logits", "broken", "equal to the base's: the adapter has no effect")
    return HealthCheck("engines", "logits", "ok", text)


def _check_engine(
    engine: str, path: Path, adapter: Adapter, weights: Weights, base: np.ndarray, adapted: np.ndarray, ids: np.ndarray
) -> HealthCheck:
    """Run an adapter in an engine, and compare the engine's logits with llorch's."""
    if unsupported := unsupported_reason(engine, weights.config, len(ids)):
        return HealthCheck("engines", _TITLES[engine], "absent", f"no reference for this base: {unsupported}")
    missing = [package for package in _PACKAGES[engine] if find_spec(package) is None]
    if missing:
        text = f"no {', no '.join(missing)}"
        return HealthCheck("engines", _TITLES[engine], "absent", text, "pip install 'llorch[golden]'")
    try:
        with TemporaryDirectory(prefix="llorch-") as folder:
            engine_logits = _RUNS[engine](path, adapter, weights, ids.tolist(), Path(folder))
    except (EngineDied, FormatError) as error:
        return HealthCheck("engines", _TITLES[engine], "absent", str(error))
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        return HealthCheck("engines", _TITLES[engine], "broken", f"refused: {' '.join(str(error).split())[:300]}")
    tolerance = min(_SPREAD * float(adapted.std()), _EFFECT * float(np.abs(adapted - base).max()))
    error = float(np.abs(engine_logits - adapted).max())
    text = f"differ from llorch's by up to {error:.3g}"
    if error <= max(tolerance, _ROUNDING * float(np.abs(adapted).max())):
        return HealthCheck("engines", _TITLES[engine], "ok", text)
    base_error = float(np.abs(engine_logits - base).max())
    text = f"{text}, and from the logits without the adapter by up to {base_error:.3g}"
    return HealthCheck("engines", _TITLES[engine], "broken", text)


def _run_peft(path: Path, adapter: Adapter, weights: Weights, ids: list[int], folder: Path) -> np.ndarray:
    base = Path(weights.path)
    if not base.is_dir():  # transformers loads a GGUF base as a text-only model
        adapter = replace(adapter, targets=alone(adapter.targets))
    if not path.is_dir() or (has_multimodal_names(path) and not base.is_dir()):
        unknown = BaseIdentity(name="", config="", vectors="", matrices="", types=())
        write_peft(adapter, folder / "adapter", base=unknown)
        path = folder / "adapter"
    return in_child("transformers", base, "llorch.engines.peft:peft_logits", base, path, ids)


def _run_llamacpp(path: Path, adapter: Adapter, weights: Weights, ids: list[int], folder: Path) -> np.ndarray:
    write_lora_gguf(adapter, folder / "adapter.gguf", weights.config)  # always: it refuses what crashes llama.cpp
    path, base = folder / "adapter.gguf" if path.is_dir() else path, Path(weights.path)
    return in_child("llamacpp", base, "llorch.engines.llamacpp:logits_with_adapter", base, path, ids)


_RUNS: dict[str, Callable[[Path, Adapter, Weights, list[int], Path], np.ndarray]] = {
    "peft": _run_peft,
    "llamacpp": _run_llamacpp,
}
