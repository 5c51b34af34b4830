"""Make the small quantised folders and the goldens of their weights again, or check that the stored ones can be made.

    python reference_outputs/quantised_folders.py                 write all that can be made here
    python reference_outputs/quantised_folders.py gptq bnb        write those whose name starts so
    python reference_outputs/quantised_folders.py --check         compare with the stored ones

A library writes each folder where it runs on a CPU; `quantised_writers/by_script.py` writes the others. The libraries
need different environments: a folder or a golden that needs a missing package says NOT RUN. Goldens come from a
library's own dequantiser, never from code of this repository.
"""

import json
import os
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
from quantised_writers import base, by_libraries, by_script, dequantise
from safetensors import safe_open

FOLDER = Path(__file__).resolve().parent / "quantised_folders"
GOLDENS = FOLDER / "goldens.json"
N_SAMPLES = 16
Rows = dict[str, tuple[tuple[str, ...], Callable[[Path], None]]]  # packages that write it, function
Golden = dict[str, Any]


def rows() -> Rows:
    """Return the table of folders."""
    table: Rows = {"float": ((), lambda to: base.write(to, base.config("small"), base.float_tensors("small")))}
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
    failures = 0
    for name, (packages, make) in rows().items():
        if names and not name.startswith(names):
            continue
        lines, report = check_folder(name, packages, make) if check else write_folder(name, packages, make)
        made, said = golden_of(name, goldens.get(name, {}))
        if check and made != {key: value for key, value in goldens.get(name, {}).items() if key != "writer"}:
            lines.append("golden differs")
        goldens[name] = {"writer": said_by(packages) or goldens.get(name, {}).get("writer")} | made
        failures += len(lines)
        click.echo("\n".join(f"{name}: {line}" for line in lines) or f"{name}: {report}; golden {said}")
    if not check:
        GOLDENS.write_text(dump(goldens), encoding="utf-8", newline="\n")
        (FOLDER / "README.md").write_text(readme(goldens), encoding="utf-8", newline="\n")
    sys.exit(1 if failures else 0)


def missing(packages: tuple[str, ...]) -> str:
    """Say which package is not here, or not in the version that is needed; empty if none."""
    for package in packages:
        name, _, needed = package.partition("==")
        if found := installed(name):
            if not needed or found == needed:
                continue
            return f"it needs {name} {needed}, {found} is installed"
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


def write_folder(name: str, packages: tuple[str, ...], make: Callable[[Path], None]) -> tuple[list[str], str]:
    """Write a folder; return no complaint and a report."""
    if reason := missing(packages):
        return [], f"NOT RUN, {reason}"
    make(FOLDER / name)
    return [], f"written by {said_by(packages)}"


def check_folder(name: str, packages: tuple[str, ...], make: Callable[[Path], None]) -> tuple[list[str], str]:
    """Make a folder again and compare config.json and every tensor bit by bit; return complaints and a report."""
    if reason := missing(packages):
        return [], f"NOT RUN, {reason}"
    stored, lines = FOLDER / name, []
    with TemporaryDirectory() as temporary:
        made = Path(temporary)
        make(made)
        lines += [file.name for file in stored.glob("*.json") if json.loads(file.read_text()) != read(made / file.name)]
        new, old = tensors(made), tensors(stored)
    lines += [
        f"tensor {tensor} differs" for tensor in sorted(new.keys() | old.keys()) if new.get(tensor) != old.get(tensor)
    ]
    return lines, "reproduced"


def read(path: Path) -> object:
    """Read a JSON file; a missing file is None."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        read_tensors = {name: file.get_tensor(name) for name in file.keys()}
    return {
        name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in read_tensors.items()
    }


def golden_of(name: str, stored: Golden) -> tuple[Golden, str]:
    """Dequantise the stored folder by the library of its row; keep the stored golden where that library is missing."""
    row = next((row for key, row in dequantise.BY_NAME.items() if name.startswith(key)), None)
    if row is None:
        reason = dequantise.WITHOUT.get(name, "its weights are not quantised")
        return {"dequantiser": None, "reason": reason}, f"none: {reason}"
    if reason := missing(row.packages):
        return {key: value for key, value in stored.items() if key != "writer"}, f"NOT RUN, {reason}"
    weights = row.run(FOLDER / name)
    about = {"dequantiser": f"{said_by(row.packages)}: {row.function}", "rounds_to": row.rounds_to}
    about |= {"note": row.note} if row.note else {}
    return about | {"weights": {key: fingerprint(weights[key]) for key in sorted(weights)}}, "made"


def fingerprint(weight: torch.Tensor) -> dict[str, object]:
    """Return shape, SHA-256 of the little-endian float32 bytes, and values at fixed positions."""
    values = np.ascontiguousarray(weight.detach().to(torch.float32).numpy(), "<f4")
    places = np.linspace(0, values.size - 1, N_SAMPLES).astype(int)
    samples = [float(f"{value:.9g}") for value in values.reshape(-1)[places]]
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
        by = golden.get("dequantiser") or f"none: {golden.get('reason')}"
        lines.append(f"| `{name}` | {golden['writer']} | {by} | {golden.get('rounds_to', '')} |")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    before, after = page.split("<!-- table -->\n")[0], page.split("<!-- end of the table -->\n")[-1]
    return f"{before}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end of the table -->\n{after}"


if __name__ == "__main__":
    main()
