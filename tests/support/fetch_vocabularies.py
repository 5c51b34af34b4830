"""Get what only the source distribution of llama-cpp-python has: vocabularies, chat templates, llama.cpp's converter.

python tests/support/fetch_vocabularies.py FOLDER
LLORCH_VOCABULARIES=FOLDER LLORCH_LLAMACPP=FOLDER pytest -m "live or weights"
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAMES = ("qwen2", "llama-bpe", "llama-spm")
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SUFFIXES = (".gguf", ".gguf.inp", ".gguf.out")
TEMPLATES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
)
WANTED = (
    *(f"models/ggml-vocab-{name}{suffix}" for name in NAMES for suffix in SUFFIXES),
    *(f"models/templates/{name}.jinja" for name in TEMPLATES),
)
CONVERTER = ("conversion", "gguf-py/gguf")  # two packages, whole: a family is a module


def fetch(folder: Path) -> list[Path]:
    """Download the source distribution and unpack the wanted files.

    Args:
        folder: Where they go; made if it is not there.

    Returns:
        The files.

    Raises:
        SystemExit: The download failed, or the distribution lacks one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        # pip prepares the metadata of what it downloads and so fetches build tools; nothing is compiled.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", work]
        result = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
        archives = list(Path(work).glob("*.tar.gz"))
        if result.returncode or len(archives) != 1:
            last = (result.stderr or result.stdout).strip().splitlines()[-3:]
            sys.exit(f"fetch_vocabularies: pip could not download {PACKAGE}=={VERSION}:\n  " + "\n  ".join(last))
        return unpack(archives[0], folder)


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Copy the wanted files and the converter's modules out of the source distribution, and nothing else.

    Args:
        archive: The source distribution.
        folder: Where they go.

    Returns:
        The files.

    Raises:
        SystemExit: One of them is not in it.
    """
    tree = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with tarfile.open(archive) as content:
        members = {member.name.removeprefix(tree): member for member in content if member.isfile()}
        modules = [name for name in members if name.endswith(".py") and name.rpartition("/")[0] in CONVERTER]
        for name in (*WANTED, *(f"{package}/__init__.py" for package in CONVERTER)):
            if name not in members:
                sys.exit(f"fetch_vocabularies: {archive.name} has no file {tree}{name}")
        for name in (wanted := (*WANTED, *modules)):
            members[name].name = name.removeprefix("models/")
            content.extract(members[name], folder, filter="data")
    return [folder / members[name].name for name in wanted]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(f"{len(fetch(Path(sys.argv[1])))} files are in {sys.argv[1]}")
