"""Pin all packages of the atlas's engines: `python -m benchmarks.atlas.locks [NAME ...]`.

Needs uv. Next to `benchmarks/atlas/engines/NAME.txt`, which people edit, it writes `NAME.lock`, which pip installs. The
first line of a lock says how much one environment downloads on the machine that wrote it.
"""

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlparse

from packaging.markers import Marker
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from benchmarks.atlas.catalogue import ADAPTERS, ENGINES

INSTALLED = sorted(engine.script for engine in ENGINES if not engine.why_not and not engine.is_reference_engine)
COMPILE = ("uv", "pip", "compile", "--quiet", "--python-version", "3.11", "--no-header", "--no-annotate")


def main(names: list[str]) -> None:
    """Write the lock files of some engines, or of all."""
    for pins in (ADAPTERS / f"{name}.txt" for name in names or INSTALLED):
        with TemporaryDirectory() as folder:
            table, pins_file = Path(folder, "pylock.toml"), Path(folder, "pinned.txt")
            compiled("--format", "pylock.toml", str(pins), "-o", str(table))
            compiled(str(pins), "-o", str(pins_file))
            n_bytes = sum(map(size, tomllib.loads(table.read_text(encoding="utf-8"))["packages"]))
            lines = f"# {n_bytes} bytes to download\n{pins_file.read_text(encoding='utf-8')}"
        pins.with_suffix(".lock").write_text(lines, encoding="utf-8", newline="\n")


def compiled(*arguments: str) -> None:
    """Resolve for every machine, else for this machine: some packages exist for Linux only."""
    if subprocess.run([*COMPILE, "--universal", *arguments], stderr=subprocess.DEVNULL, check=False).returncode:
        subprocess.run([*COMPILE, *arguments], check=True)


def size(package: Mapping[str, Any]) -> int:
    """Count the bytes of the file that pip would install here; 0 for a package of other machines."""
    if "marker" in package and not Marker(package["marker"]).evaluate():
        return 0
    files = {name_of(wheel): bytes_of(wheel) for wheel in package.get("wheels", [])}
    order = {tag: index for index, tag in enumerate(sys_tags())}
    candidates = [
        (min(order[tag] for tag in tags & order.keys()), name) for name, tags in tags_of(files) if tags & order.keys()
    ]
    return files[min(candidates)[1]] if candidates else package["sdist"]["size"]


def bytes_of(wheel: Mapping[str, Any]) -> int:
    """Return the size in the index, or the size of the local file."""
    return wheel["size"] if "size" in wheel else Path(wheel.get("path") or urlparse(wheel["url"]).path).stat().st_size


def name_of(wheel: Mapping[str, Any]) -> str:
    """Return the file name, taken from the address if the table gives none."""
    return wheel.get("name") or (wheel.get("url") or wheel["path"]).rpartition("/")[2]


def tags_of(names: Mapping[str, int]) -> list[tuple[str, frozenset]]:
    """List the platform and Python tags of each wheel."""
    return [(name, parse_wheel_filename(name)[3]) for name in names]


if __name__ == "__main__":
    main(sys.argv[1:])
