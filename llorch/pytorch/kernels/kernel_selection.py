"""Select the kernels of llorch for a device: on CUDA, kernels that passed their check on this device.

Each kernel is checked in a separate process before its first use on a device (see `kernel_check`): a kernel that reads
invalid memory ends its process, and a kernel in a deadlock never ends. Results are cached for this device, driver,
torch, Triton and source. The CPU kernels, whose compiled part has run on many machines, are checked only if the user
asks for llorch's kernels (`kernels="own"`, see `load_torch`).
"""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from llorch.ops.compiled.library import digest, find_compiler, identity, private_folder
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target, compute_as_named, target
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.kernel_check import KernelCheck, check_kernel, make_clock
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.table import install_kernels, kernels_for
from llorch.runtime.errors import CheckpointMismatch
from llorch.runtime.memory import keep_freed_memory
from llorch.runtime.worker import PIPE, end_with_parent, run

logger = logging.getLogger(__name__)

Attention = Literal["sdpa", "eager"]
PATIENCE = 300.0  # seconds; the process also compiles the kernels


@cache
def built_kernels(target: Target, *, training: bool = False) -> KernelTable:
    """Select llorch's kernels for a target: none (torch), all (own), or the correct ones that are not slower (auto).

    `training`: select the kernels that support backward, and no others; on the CPU only packed matrices have them.
    Raises CheckpointMismatch if `own` is set and a kernel is wrong.
    """
    if target.kernels == "torch":
        return {}
    kernels, force = kernels_for(target.device, target.dtype, required=target.kernels == "own"), target.kernels == "own"
    kernels = {kind: make for kind, make in kernels.items() if kind.startswith(TRAINED) is training}
    if not kernels or (target.device.type == "cpu" and not force):
        return kernels
    checks = verdicts(target, list(kernels))
    faults = {kind: fault for kind in kernels if (fault := checks[kind].fault(timed=not force))}
    text = "; ".join(f"{kind} {fault}" for kind, fault in faults.items())
    if faults and force:
        raise CheckpointMismatch(f"kernels own, {target} on {device_name(target.device)}: {text}; use --kernels auto")
    if faults:
        logger.warning(
            "kernels: on %s in %s torch's kernels replace llorch's, because of: %s",
            device_name(target.device), target, text,
        )  # fmt: skip
    return {kind: make for kind, make in kernels.items() if kind not in faults}


def speed_up(
    module: CausalLM, target: Target, attention: Attention, *, compiled: bool, without: Sequence[str] = ()
) -> None:
    """Replace modules by kernels, except the kinds in `without`; torch.compile fuses the modules that remain."""
    if attention == "sdpa":
        use_sdpa(module)
    kernels = {kind: make for kind, make in built_kernels(target).items() if kind not in without}
    on_cpu = target.device.type == "cpu"
    if compiled:
        kernels = {kind: make for kind, make in kernels.items() if kind.startswith("packed") and not on_cpu}
    if kernels and on_cpu:
        keep_freed_memory()
    install_kernels(module, kernels)
    if not on_cpu:
        torch.cuda.empty_cache()  # frees the originals of fused matrices


def speed_up_training(module: CausalLM, target: Target) -> None:
    """Replace modules by fused attention and by kernels that support backward."""
    use_sdpa(module)
    trained = built_kernels(target, training=True)
    if trained and target.device.type == "cpu":
        keep_freed_memory()
    install_kernels(module, {kind.removeprefix(TRAINED): make for kind, make in trained.items()})


def verdicts(target: Target, kinds: Sequence[str], *, anew: bool = False) -> Mapping[str, KernelCheck]:
    """Return the checks of some kinds of kernels, run now or, without `anew`, by an earlier process."""
    folder = private_folder()
    cache_file = None if folder is None else folder / f"kernels-{_cache_key(target)}.json"
    checks = {} if cache_file is None or anew else _read_results(cache_file)
    if missing := [kind for kind in kinds if kind not in checks]:
        scope = f"{len(missing)} kernels on {device_name(target.device)} in {target.dtype_name}"
        logger.warning("kernels: checking %s, once for this device, dtype and version; a minute or two on CUDA", scope)
        checks |= run_in_child(target, missing)
        if cache_file is not None:
            _write_results(cache_file, checks)
    return checks


def run_in_child(
    target: Target, kinds: Sequence[str], *, program: Sequence[str] = ("-m", __name__)
) -> dict[str, KernelCheck]:
    """Check kernels in another process; a kernel that ends it has failed, and a new process checks those left."""
    checks: dict[str, KernelCheck] = {}
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        file = Path(folder) / "results"
        while pending := [kind for kind in kinds if kind not in checks]:
            failure = _run_check([sys.executable, *program, str(file), str(target.device), target.dtype_name, *pending])
            checks |= _read_results(file)
            if all(kind in checks for kind in pending):
                break
            culprit = next(kind for kind in pending if kind not in checks)
            checks[culprit] = KernelCheck(float("inf"), float("nan"), failure)
    return checks


def _run_check(command: Sequence[str]) -> str:
    """Run a process to its end, or `PATIENCE`; return a description of a failure (of no use after success)."""
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    process = run(command, seconds=PATIENCE, env=environment, stdin=PIPE)
    if process.limit:
        return f"the check did not end within {PATIENCE:.0f} s"
    return f"the process of the check ended with status {process.status}: {(process.error_line or 'no message')[:200]}"


def main(result_file: str, device: str, dtype: str, *kinds: str) -> None:
    """Check each kernel and append its result to a file at once, so that later crashes lose nothing."""
    backend = target(device, dtype)
    compute_as_named(backend)
    kernels = kernels_for(backend.device, backend.dtype, required=True)
    for kind in kinds:
        check = check_kernel(kind, kernels, backend, make_clock(backend.device, kind))
        with Path(result_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: asdict(check)}) + "\n")


def _read_results(file: Path) -> dict[str, KernelCheck]:
    """Read the results of a file; empty if the file is missing or damaged."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return {kind: KernelCheck(**fields) for line in lines for kind, fields in line.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_results(file: Path, checks: Mapping[str, KernelCheck]) -> None:
    """Write results atomically, so that another process sees all or none; without success they are checked again."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as temporary:
            temporary.write(json.dumps({kind: asdict(check) for kind, check in checks.items()}) + "\n")
        Path(temporary.name).replace(file)
    except OSError:
        return


def device_name(device: torch.device) -> str:
    """Return the driver's name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _cache_key(target: Target) -> str:
    """Hash everything that determines the results: device and driver, compiler, dtype, versions and all sources."""
    if target.device.type == "cpu":
        device_version = identity(find_compiler() or [])
    else:
        from triton import __version__ as triton

        device_version = repr((device_name(target.device), driver(), torch.version.cuda, triton))
    sources = (path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return digest(repr((device_version, target.dtype_name, torch.__version__)).encode(), *sources)


def driver() -> str:
    """Return the version of the NVIDIA driver, from Linux or else from torch."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        from torch.utils.collect_env import get_nvidia_driver_version, run

        return str(get_nvidia_driver_version(run))


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
