"""Build hook of hatchling: the commit for `llorch --version`, and goldens of one case for the wheel."""

import json
import lzma
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "llorch/commit.txt"
COMMAND = ("git", "describe", "--always", "--dirty", "--exclude=*")
CASE = "near"  # case of the goldens that the wheel has of the models in the setting `one-case`
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23, "lc": 1, "lp": 3, "pb": 3}]


class CommitHook(BuildHookInterface):
    """Hook that adds `llorch/commit.txt` to builds from a git checkout, and goldens to the wheel.

    A build from the sdist has the commit already. The setting `one-case` lists the models whose goldens of `CASE` the
    wheel gets.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files into a temporary folder and add them to the build."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        for name, content in {**self._commit(), **self._goldens()}.items():
            file = Path(self._folder.name) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            build_data["force_include"][str(file)] = name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _commit(self) -> dict[str, bytes]:
        if not (Path(self.root) / ".git").exists():
            return {}
        process = subprocess.run(COMMAND, cwd=self.root, capture_output=True, check=False)
        return {FILE: process.stdout} if process.returncode == 0 else {}

    def _goldens(self) -> dict[str, bytes]:
        """Return the files of the goldens of one case, by their paths in the wheel."""
        models = self.config.get("one-case", []) if self.target_name == "wheel" else []
        files = {}
        for folder in (Path(self.root) / "reference_outputs" / model for model in models):
            in_wheel = f"llorch/reference_outputs/{folder.name}"
            files[f"{in_wheel}/golden.json"] = record_of_case((folder / "golden.json").read_bytes())
            for name in ("llamacpp", "transformers", "truth"):
                path = f"{name}.safetensors.xz"
                files[f"{in_wheel}/{path}"] = arrays_of_case((folder / path).read_bytes())
        return files


def record_of_case(content: bytes) -> bytes:
    """Return the record of goldens without the other cases."""
    record = json.loads(content)
    record["cases"] = {CASE: record["cases"][CASE]}
    record["isolated"] = {engine: {CASE: cases[CASE]} for engine, cases in record["isolated"].items()}
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def arrays_of_case(content: bytes) -> bytes:
    """Return a compressed safetensors file without the arrays of other cases."""
    data = lzma.decompress(content)
    start = 8 + int.from_bytes(data[:8], "little")
    header, chunks = {}, []
    for name, entry in _arrays(json.loads(data[8:start])):
        begin, end = entry["data_offsets"]
        n_before = sum(map(len, chunks))
        chunks.append(data[start + begin : start + end])
        header[name] = {**entry, "data_offsets": [n_before, n_before + end - begin]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # arrays of 8 bytes a number stay aligned
    return lzma.compress(b"".join([len(text).to_bytes(8, "little"), text, *chunks]), filters=FILTERS)


def _arrays(header: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the arrays of the case in the order of their bytes."""
    entries = {name: entry for name, entry in header.items() if name.startswith(f"{CASE}/")}
    yield from sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
