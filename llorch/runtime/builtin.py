"""Paths, in a wheel and in a clone, of the built-in models, their goldens (reference outputs) and the example data."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from llorch.runtime.errors import NotInWheel, suggestion

BUILTIN = ("micro-llama", "micro-llama3", "micro-qwen2", "micro-qwen3", "story")  # dense
OTHERS = (  # families with their own blocks
    "micro-qwen2-moe", "micro-qwen3-moe", "micro-qwen3.5", "micro-qwen3.5-moe", "micro-qwen3-next",
    "micro-smollm3", "micro-ministral3", "micro-llama4",
)  # fmt: skip
FOLDERS = ("micro-mistral", "micro-qwen3-vl-moe")  # no GGUF files: sliding windows; multimodal, transposed experts
EVERY = (*BUILTIN, *OTHERS, *FOLDERS)
IN_WHEEL = BUILTIN  # models that the wheel contains
GOLDENS_IN_WHEEL = ("micro-llama", "micro-llama3", "micro-qwen2", "micro-qwen3")  # with forward goldens, see `is_wheel`
DATA = ("pirate", "pirate-chat")  # example data sets
_PACKAGE = Path(__file__).parents[1]


def builtin_path(name: str) -> Path:
    """Return the GGUF file of a built-in model, or the folder of a model in `FOLDERS`."""
    if name not in EVERY:
        raise FileNotFoundError(
            f"model {name!r}: no such file or folder, and not a built-in model ({', '.join(EVERY)})"
            + suggestion(name, EVERY)
        )
    if name not in installed_models([name]):
        raise NotInWheel(f"model {name!r}: expected a model of this wheel ({', '.join(IN_WHEEL)})")
    return _PACKAGE / "models" / (name if name in FOLDERS else f"{name}.gguf")


def is_wheel() -> bool:
    """Check if this llorch was installed from a wheel, which contains only the models of `IN_WHEEL`.

    It has the forward goldens of `GOLDENS_IN_WHEEL`, of some only the case `near`; no long contexts, no training.
    """
    return (_PACKAGE / "reference_outputs").is_dir()


def installed_models(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the built-in models that this installation contains."""
    return tuple(name for name in names if not is_wheel() or name in IN_WHEEL)


def models_with_goldens(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the built-in models whose forward goldens this installation contains."""
    return tuple(name for name in names if not is_wheel() or name in GOLDENS_IN_WHEEL)


def missing_golden(path: Path) -> FileNotFoundError:
    """Return the error for a missing golden: a failure in a clone, `NotInWheel` in a wheel."""
    if is_wheel():
        name = f"{path.parent.name}/{path.name}"
        return NotInWheel(f"golden {name}: this wheel holds only the forward goldens of {', '.join(GOLDENS_IN_WHEEL)}")
    return FileNotFoundError(f"golden {path} is missing; make it with reference_outputs/regenerate.py")


def is_builtin_name(name: str, names: Collection[str], report: Callable[[str], None]) -> bool:
    """Check if a name is built-in, which has priority over a path; report a line if both exist."""
    if name not in names:
        return False
    if Path(name).exists():
        report(f"note: {name} means the built-in {name}; for the path, write ./{name}")
    return True


def find_data(path_or_name: str, report: Callable[[str], None] = lambda line: None) -> Path:
    """Find training data: a built-in data set of `DATA`, else an existing file or folder."""
    path = Path(path_or_name)
    if is_builtin_name(path_or_name, DATA, report):
        return _PACKAGE / "examples" / path_or_name
    if path_or_name and path.exists():
        return path
    raise FileNotFoundError(
        f"data {path_or_name!r}: no such file or folder, and not a built-in data set ({', '.join(DATA)})"
        + suggestion(path_or_name, DATA)
    )


def goldens_folder() -> Path:
    """Return the folder with the goldens of each built-in model: in the package (wheel), or next to it (clone)."""
    return (_PACKAGE if is_wheel() else _PACKAGE.parent) / "reference_outputs"
