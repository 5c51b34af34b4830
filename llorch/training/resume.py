"""Conditions for a bit-exact resumed run: equal settings, data and environment."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llorch.runtime.errors import FormatError

PACKAGES = ("llorch", "torch", "numpy", "safetensors", "tokenizers")
NOTHING = "nothing"  # text for a value that one side lacks
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # variable, and llorch's value if it is not set


def environment(device: str) -> dict[str, Any]:
    """Collect versions, threads, device and torch switches, which affect the bits of a run."""
    import torch

    kind = torch.device(device)
    properties = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": "cpu" if kind.type == "cpu" else torch.cuda.get_device_name(kind),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }
    return properties | (_cuda_switches() if kind.type == "cuda" else {})


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, sides: tuple[str, str] = ("saved", "now")
) -> dict[str, str]:
    """Map each name whose value or type differs to a line `name: saved X, now Y`; nested names are joined by dots."""
    old, new = dict(_flat_values(saved)), dict(_flat_values(now))
    return {
        name: f"{name}: {sides[0]} {_format_value(old, name)}, {sides[1]} {_format_value(new, name)}"
        for name in {**old, **new}
        if name not in old or name not in new or old[name] != new[name] or type(old[name]) is not type(new[name])
    }


def require_same(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    allow_change: bool,
    path: Path,
    data_change: Callable[[], str] = str,
) -> list[str]:
    """Refuse (FormatError Inconsistent) to resume a run that has changed, unless `allow_change`.

    Return the differences as lines; without any, the run will be bit-exact. `data_change` names the changed row.
    """
    changes = differences(saved, now)
    if "data" in changes and (row := data_change()):
        changes["data"] += f" ({row})"
    if changes and not allow_change:
        advice = "undo the change, or resume with --allow-change, which is not bit-exact"
        raise FormatError("Inconsistent", f"the run has changed: {'; '.join(changes.values())}; {advice}", path=path)
    return [*changes.values()]


def _cuda_switches() -> dict[str, Any]:
    """Return the versions and switches of CUDA that affect the bits of a run."""
    import torch

    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas_workspace": os.environ.get(*CUBLAS_WORKSPACE),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "reduced_bf16_sums": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdpa": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _flat_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with dotted names; tuples become lists, as in JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _format_value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return NOTHING
    text = str(values[name])
    return text if len(text) <= 60 else text[:57] + "..."
