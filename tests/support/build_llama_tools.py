"""Build programs of llama.cpp from the source distribution of llama-cpp-python, for benchmarks/published.py.

python tests/support/build_llama_tools.py FOLDER

FOLDER is that of fetch_vocabularies.py; the programs go to FOLDER/tools. It needs cmake and a C++ compiler,
and takes some ten minutes of one core.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fetch_vocabularies import DATA, LLAMA_CPP, download

PROGRAMS = ("llama-perplexity", "llama-gguf-split")
# One static program each; nothing for servers, networks and graphics cards.
SWITCHES = {
    "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "OFF", "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_SERVER": "OFF", "LLAMA_BUILD_COMMON": "ON",
    "LLAMA_BUILD_TOOLS": "ON", "LLAMA_CURL": "OFF", "LLAMA_OPENSSL": "OFF", "GGML_CCACHE": "OFF",
    "GGML_OPENMP": "OFF",
}  # fmt: skip


def build(folder: Path, n_jobs: int) -> list[Path]:
    """Download the sources, build the programs and copy them to `folder/tools`.

    Args:
        folder: Where `tools` goes; made if it is not there.
        n_jobs: Compilers that run at a time.

    Returns:
        The programs.

    Raises:
        SystemExit: cmake is missing, or a download or the build failed.
    """
    if shutil.which("cmake") is None:
        sys.exit("build_llama_tools: cmake: expected on the path, not found; pip install cmake ninja")
    tools = folder / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        archive = download(LLAMA_CPP, Path(name))
        with tarfile.open(archive) as content:
            content.extraction_filter = DATA
            content.extractall(name)
        source = Path(name, archive.name.removesuffix(".tar.gz"), "vendor/llama.cpp")
        switches = [f"-D{key}={value}" for key, value in SWITCHES.items()]
        _run("cmake", "-S", str(source), "-B", f"{name}/build", *switches)
        _run("cmake", "--build", f"{name}/build", "-j", str(n_jobs), "--target", *PROGRAMS)
        return [Path(shutil.copy2(Path(name, "build/bin", program), tools / program)) for program in PROGRAMS]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-5:]
        sys.exit(f"build_llama_tools: {' '.join(words[:2])} failed:\n  " + "\n  ".join(last))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*build(Path(sys.argv[1]), int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "1"))), sep="\n")
