"""The kernels of llorch that a model gets on a device: on CUDA those that have passed their check there.

Before they are first used on a device, each is tried in a process of its own (see `kernel_check`), as a kernel
that reads what is not its own ends the whole process, and one that waits for itself never ends. Results are kept for
this very device, driver, torch, Triton and source. The kernels of the CPU, whose compiled part has run on many
machines, are tried when the user asks for llorch's kernels by name.
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

from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target, compute_as_named, target
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.cpu.library import digest, find_compiler, identity, private_folder
from llorch.pytorch.kernels.kernel_check import KernelCheck, seconds, tried
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.kernels.table import install_kernels, kernels_for
from llorch.runtime.errors import CheckpointMismatch
from llorch.runtime.memory import keep_freed_memory
from llorch.runtime.worker import PIPE, end_with_parent, run

logger = logging.getLogger(__name__)

Attention = Literal["sdpa", "eager"]
PATIENCE = 300.0  # seconds that one process may take: kernels are compiled in it


@cache
def built_kernels(at: Target, *, training: bool = False) -> KernelTable:
    """Choose llorch's kernels for a target: none (torch), all (own), or those that are right and no slower (auto).

    `training`: the kernels that record gradients, and no others; on the CPU only packed matrices have them.
    CheckpointMismatch where one is wrong that was asked for by name.
    """
    if at.kernels == "torch":
        return {}
    kernels, asked = kernels_for(at.device, at.dtype, required=at.kernels == "own"), at.kernels == "own"
    kernels = {kind: make for kind, make in kernels.items() if kind.startswith(TRAINED) is training}
    if not kernels or (at.device.type == "cpu" and not asked):
        return kernels
    found = verdicts(at, list(kernels))
    faults = {kind: fault for kind in kernels if (fault := found[kind].fault(timed=not asked))}
    told = "; ".join(f"{kind} {fault}" for kind, fault in faults.items())
    if faults and asked:
        raise CheckpointMismatch(f"kernels own, {at} on {device_name(at.device)}: {told}; use --kernels auto")
    if faults:
        logger.warning(
            "kernels: on %s in %s torch's kernels replace llorch's, because of: %s", device_name(at.device), at, told
        )
    return {kind: make for kind, make in kernels.items() if kind not in faults}


def speed_up(
    module: CausalLM, at: Target, attention: Attention, *, compiled: bool, without: Sequence[str] = ()
) -> None:
    """Put kernels in place of plain modules, except some kinds; torch.compile fuses the modules that stay plain."""
    if attention == "sdpa":
        use_sdpa(module)
    kernels = {kind: make for kind, make in built_kernels(at).items() if kind not in without}
    on_cpu = at.device.type == "cpu"
    if compiled:
        kernels = {kind: make for kind, make in kernels.items() if kind.startswith("packed") and not on_cpu}
    if kernels and on_cpu:
        keep_freed_memory()
    install_kernels(module, kernels)
    if not on_cpu:
        torch.cuda.empty_cache()  # matrices that were copied to lie side by side


def speed_up_training(module: CausalLM, at: Target) -> None:
    """Put fused attention and the kernels that record gradients in place of plain modules."""
    use_sdpa(module)
    trained = built_kernels(at, training=True)
    if trained and at.device.type == "cpu":
        keep_freed_memory()
    install_kernels(module, {kind.removeprefix(TRAINED): make for kind, make in trained.items()})


def verdicts(at: Target, kinds: Sequence[str], *, anew: bool = False) -> Mapping[str, KernelCheck]:
    """Return the verdicts on some kinds of kernels, found now or, without `anew`, by an earlier process."""
    folder = private_folder()
    kept = None if folder is None else folder / f"kernels-{_name(at)}.json"
    found = {} if kept is None or anew else _read_results(kept)
    if missing := [kind for kind in kinds if kind not in found]:
        where = f"{len(missing)} kernels on {device_name(at.device)} in {at.dtype_name}"
        logger.warning("kernels: checking %s, once for this device, dtype and version; a minute or two on CUDA", where)
        found |= try_apart(at, missing)
        if kept is not None:
            _keep(kept, found)
    return found


def try_apart(at: Target, kinds: Sequence[str], *, program: Sequence[str] = ("-m", __name__)) -> dict[str, KernelCheck]:
    """Try kernels in another process; a kernel that ends it leaves the rest to the next process."""
    found: dict[str, KernelCheck] = {}
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        results = Path(folder) / "results"
        while left := [kind for kind in kinds if kind not in found]:
            how = _run_trial([sys.executable, *program, str(results), str(at.device), at.dtype_name, *left])
            found |= _read_results(results)
            if all(kind in found for kind in left):
                break
            culprit = next(kind for kind in left if kind not in found)
            found[culprit] = KernelCheck(float("inf"), float("nan"), how)
    return found


def _run_trial(command: Sequence[str]) -> str:
    """Run a process to its end; says how that was."""
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    ended = run(command, seconds=PATIENCE, env=environment, stdin=PIPE)
    if ended.limit:
        return f"the check did not end within {PATIENCE:.0f} s"
    return f"the process of the check ended with status {ended.status}: {(ended.last_words or 'no message')[:200]}"


def main(results: str, device: str, dtype: str, *kinds: str) -> None:
    """Try each kernel in a separate process, and write a line of results as soon as a kernel is tried."""
    at = target(device, dtype)
    compute_as_named(at)
    kernels = kernels_for(at.device, at.dtype, required=True)
    for kind in kinds:
        verdict = tried(kind, kernels, at, seconds(at.device, kind))
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: asdict(verdict)}) + "\n")


def _read_results(file: Path) -> dict[str, KernelCheck]:
    """Read the results of a file; empty if the file is missing or damaged."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return {kind: KernelCheck(**values) for line in lines for kind, values in line.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(file: Path, found: Mapping[str, KernelCheck]) -> None:
    """Write results so that another process sees all of them or none; where that cannot be, they are found again."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as made:
            made.write(json.dumps({kind: asdict(verdict) for kind, verdict in found.items()}) + "\n")
        Path(made.name).replace(file)
    except OSError:
        return


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _name(at: Target) -> str:
    """Hash all that decides the results: device with driver, compiler, dtype, versions, every source of this path."""
    if at.device.type == "cpu":
        where = identity(find_compiler() or [])
    else:
        from triton import __version__ as triton

        where = repr((device_name(at.device), driver(), torch.version.cuda, triton))
    sources = (path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return digest(repr((where, at.dtype_name, torch.__version__)).encode(), *sources)


def driver() -> str:
    """Return the version of the NVIDIA driver, as Linux tells it or else as torch finds it."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        from torch.utils.collect_env import get_nvidia_driver_version, run

        return str(get_nvidia_driver_version(run))


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
