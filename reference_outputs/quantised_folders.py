"""Write the small quantised folders and the goldens of their weights, or check that the stored ones are reproduced.

    python reference_outputs/quantised_folders.py                 write all that can be made here
    python reference_outputs/quantised_folders.py gptq bnb        write those whose name starts so
    python reference_outputs/quantised_folders.py --check         compare with the stored ones

A library writes each folder where it runs on a CPU; `quantised_writers/by_script.py` writes the others. The libraries
need different environments: a folder or a golden that needs a missing package says NOT RUN. Goldens come from a
library's own dequantiser, never from code of this repository.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from quantised_writers import by_libraries, by_script, dequantise, forward
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parent / "quantised_folders"
GOLDENS, LOGITS = FOLDER / "goldens.json", FOLDER / "logits.safetensors"
LIMITS = {"float64": 1e-12, "float32": 1e-5}  # distance of logits that are made again, relative to their norm
N_SAMPLES = 4
Rows = dict[str, tuple[tuple[str, ...], Callable[[Path], None]]]  # packages that write it, function
Golden = dict[str, Any]


def rows() -> Rows:
    """Return the table of folders."""
    table: Rows = {}
    for name, make in by_script.FOLDERS.items():
        table[name] = (), lambda to, make=make: by_script.write(to, *make())
    for name, (size, packages, library) in by_libraries.FOLDERS.items():
        table[name] = packages, lambda to, size=size, library=library: by_libraries.make(size, library, to)
    return table


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Compare with the stored folders and goldens instead of writing.")
def main(names: tuple[str, ...], check: bool) -> None:
    """Entry point."""
    goldens: dict[str, Golden] = json.loads(GOLDENS.read_text(encoding="utf-8")) if GOLDENS.is_file() else {}
    stored_logits = load_file(LOGITS) if LOGITS.is_file() else {}
    logits, failures = dict(stored_logits), 0
    for name, (packages, make) in rows().items():
        if names and not name.startswith(names):
            continue
        lines, report = make_again(name, packages, make, replace=not check)
        golden, status = golden_of(name, goldens.get(name, {}))
        facts, run = forward_of(name, goldens.get(name, {}).get("forward"))
        golden |= {"forward": facts} if facts else {}
        logits |= run
        if check:
            lines += [f"logits {key} differ" for key, new in run.items() if differ(new, stored_logits.get(key))]
        if check and golden != {key: value for key, value in goldens.get(name, {}).items() if key != "writer"}:
            lines.append("golden differs")
        goldens[name] = {"writer": said_by(packages) or goldens.get(name, {}).get("writer")} | golden
        failures += len(lines)
        report += f"; golden {status}" + (f"; logits {'made' if run else 'NOT RUN'}" if facts else "")
        click.echo("\n".join(f"{name}: {line}" for line in lines) or f"{name}: {report}")
    if not check:
        save_file(dict(sorted(logits.items())), LOGITS)
        goldens = {name: goldens[name] for name in rows() if name in goldens}
        GOLDENS.write_text(dump(goldens), encoding="utf-8", newline="\n")
        (FOLDER / "README.md").write_text(readme(goldens), encoding="utf-8", newline="\n")
    sys.exit(1 if failures else 0)


def missing(packages: tuple[str, ...]) -> str:
    """Return why a package cannot be used: missing, or of another version; empty if all are usable."""
    for package in packages:
        name, _, needed = package.partition("==")
        if installed_version := installed(name):
            if not needed or installed_version == needed:
                continue
            return f"it needs {name} {needed}, {installed_version} is installed"
        return "LLORCH_LLAMACPP is not set" if name == "llama.cpp" else f"{name} is not installed"
    return ""


def installed(package: str) -> str | None:
    """Return the version of an installed package; llama.cpp's converter has none."""
    if package == "llama.cpp":
        return "sources of 2026" if os.environ.get("LLORCH_LLAMACPP") else None
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def said_by(packages: tuple[str, ...]) -> str | None:
    """Name packages with their versions; None if one is missing."""
    names = [package.partition("==")[0] for package in packages]
    if missing(packages):
        return None
    return ", ".join(f"{name} {installed(name)}" for name in names) or "this script"


def make_again(
    name: str, packages: tuple[str, ...], make: Callable[[Path], None], *, replace: bool
) -> tuple[list[str], str]:
    """Make a folder and compare it with the stored one, bit by bit; return the differences and a report."""
    if reason := missing(packages):
        return [], f"NOT RUN, {reason}"
    stored_folder = FOLDER / name
    with TemporaryDirectory() as temporary:
        new_folder = Path(temporary)
        make(new_folder)
        lines = [file.name for file in new_folder.glob("*.json") if read(file) != read(stored_folder / file.name)]
        new, old = tensors(new_folder), tensors(stored_folder)
        lines += [f"tensor {key} differs" for key in sorted(new.keys() | old.keys()) if new.get(key) != old.get(key)]
        if lines and replace:
            shutil.copytree(new_folder, stored_folder, dirs_exist_ok=True)
            return [], f"written by {said_by(packages)}"
    return lines, f"reproduced by {said_by(packages)}"


def read(path: Path) -> object:
    """Read a JSON file; a missing file is None."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor."""
    if not (folder / "model.safetensors").is_file():
        return {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        read_tensors = {name: file.get_tensor(name) for name in file.keys()}
    return {
        name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in read_tensors.items()
    }


def golden_of(name: str, stored_golden: Golden) -> tuple[Golden, str]:
    """Dequantise the stored folder by the library of its row; keep the stored golden where that library is missing."""
    row = dequantise.row_of(name)
    if reason := missing(row.packages):
        return {key: value for key, value in stored_golden.items() if key != "writer"}, f"NOT RUN, {reason}"
    weights = row.run(FOLDER / name)
    golden = {"dequantiser": f"{said_by(row.packages)}: {row.function}", "rounds_to": row.rounds_to}
    golden |= {"note": row.note} if row.note else {}
    return golden | {"weights": {key: fingerprint(weights[key]) for key in sorted(weights)}}, "made"


def forward_of(name: str, stored_facts: Golden | None) -> tuple[Golden | None, dict[str, torch.Tensor]]:
    """Run the engine of a folder; keep the stored facts where the engine is missing."""
    engine = forward.ENGINES.get(name)
    if engine is None or missing(engine.packages):
        return stored_facts, {}
    run = engine.run(FOLDER / name)
    facts = {"engine": said_by(engine.packages), "dtype": engine.dtype, "numerics": list(run), "tokens": forward.TOKENS}
    facts["positions"] = list(range(len(forward.TOKENS)))[forward.POSITIONS]
    return facts, {f"{name}/{numerics}": value.contiguous() for numerics, value in run.items()}


def differ(actual: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Return True if newly made logits are not the stored ones."""
    if expected is None or expected.shape != actual.shape or expected.dtype != actual.dtype:
        return True
    limit = LIMITS[str(actual.dtype).removeprefix("torch.")]
    return bool((actual - expected).norm() > limit * expected.norm())


def fingerprint(weight: torch.Tensor) -> dict[str, object]:
    """Return shape, SHA-256 of the little-endian float32 bytes, and values at fixed positions."""
    values = np.ascontiguousarray(weight.detach().to(torch.float32).numpy(), "<f4")
    positions = np.linspace(0, values.size - 1, N_SAMPLES).astype(int)
    samples = [float(f"{value:.9g}") for value in values.reshape(-1)[positions]]
    return {"shape": list(values.shape), "sha256": sha256(values.tobytes()).hexdigest(), "samples": samples}


def dump(goldens: dict[str, Golden]) -> str:
    """Write JSON with one weight per line."""
    blocks = []
    for name, golden in goldens.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items() if key != "weights"]
        weights = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.get("weights", {}).items()]
        lines += ['  "weights": {\n' + ",\n".join(weights) + "\n  }"] if weights else []
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def readme(goldens: dict[str, Golden]) -> str:
    """Fill the table of folders into the page."""
    lines = ["| folder | written by | dequantised by | rounded to |", "|---|---|---|---|"]
    for name, golden in goldens.items():
        lines.append(f"| `{name}` | {golden['writer']} | {golden['dequantiser']} | {golden['rounds_to']} |")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    head, tail = page.split("<!-- table -->\n")[0], page.split("<!-- end of the table -->\n")[-1]
    return f"{head}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end of the table -->\n{tail}"


if __name__ == "__main__":
    main()
