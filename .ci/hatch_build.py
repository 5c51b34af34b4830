"""Build hook of hatchling: write the commit into the wheel and the sdist, for `llorch --version`."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "llorch/commit.txt"
COMMAND = ("git", "describe", "--always", "--dirty", "--exclude=*")


class CommitHook(BuildHookInterface):
    """Hook that adds `llorch/commit.txt` to builds from a git checkout; a build from the sdist has the file already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file into a temporary folder and add it to the build."""
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        process = subprocess.run(COMMAND, cwd=self.root, capture_output=True, text=True, check=False)
        if process.returncode == 0:
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "commit.txt"
            file.write_text(process.stdout, encoding="ascii")
            build_data["force_include"][str(file)] = FILE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
