"""The built-in models, their goldens and the example data: where the files lie in a wheel and in a clone."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from llorch.runtime.errors import LeftOut, suggestion

BUILTIN = ("micro-llama", "micro-llama3", "micro-qwen2", "micro-qwen3", "story")  # dense
OTHERS = (  # of families with pages of their own
    "micro-qwen2-moe", "micro-qwen3-moe", "micro-qwen3.5", "micro-qwen3.5-moe", "micro-qwen3-next",
    "micro-smollm3", "micro-ministral3", "micro-llama4",
)  # fmt: skip
FOLDERS = ("micro-mistral", "micro-qwen3-vl-moe")  # windows, which GGUF cannot say; a text part with turned experts
EVERY = (*BUILTIN, *OTHERS, *FOLDERS)
IN_WHEEL = ("micro-llama", "micro-qwen3", "story")  # with forward goldens, without those of long contexts and training
DATA = ("pirate",)
_PACKAGE = Path(__file__).parents[1]


def builtin_path(name: str) -> Path:
    """Return the GGUF file of a built-in model of `EVERY`, or the Hugging Face folder of one of `FOLDERS`."""
    if name not in EVERY:
        raise FileNotFoundError(
            f"model {name!r}: no such file or folder, and not a built-in model ({', '.join(EVERY)})"
            + suggestion(name, EVERY)
        )
    if name not in held([name]):
        raise LeftOut(f"model {name!r}: expected a model of this wheel ({', '.join(IN_WHEEL)})")
    return _PACKAGE / "models" / (name if name in FOLDERS else f"{name}.gguf")


def is_wheel() -> bool:
    """Tell whether this llorch was installed from a wheel, which holds the models of `IN_WHEEL` and no others."""
    return (_PACKAGE / "reference_outputs").is_dir()


def held(names: Iterable[str]) -> tuple[str, ...]:
    """Keep the names of the built-in models that this installation holds."""
    return tuple(name for name in names if not is_wheel() or name in IN_WHEEL)


def missing_golden(path: Path) -> FileNotFoundError:
    """Make the error for a golden that is not there: in a clone a failure, in a wheel one that may be left out."""
    if is_wheel():
        name = f"{path.parent.name}/{path.name}"
        return LeftOut(f"golden {name}: this wheel holds only the forward goldens of {', '.join(IN_WHEEL)}")
    return FileNotFoundError(f"golden {path} is missing; make it with reference_outputs/regenerate.py")


def wins(name: str, names: Collection[str], report: Callable[[str], None]) -> bool:
    """Tell whether a name is a built-in one, which wins over a path; report a line where both exist."""
    if name not in names:
        return False
    if Path(name).exists():
        report(f"note: {name} means the built-in {name}; for the path, write ./{name}")
    return True


def find_data(path_or_name: str, report: Callable[[str], None] = lambda line: None) -> Path:
    """Find training data: a built-in data set, one of `DATA`, or else an existing file or folder."""
    path = Path(path_or_name)
    if wins(path_or_name, DATA, report):
        return _PACKAGE / "examples" / path_or_name
    if path_or_name and path.exists():
        return path
    raise FileNotFoundError(
        f"data {path_or_name!r}: no such file or folder, and not a built-in data set ({', '.join(DATA)})"
        + suggestion(path_or_name, DATA)
    )


def goldens_folder() -> Path:
    """Return the folder with the goldens of each built-in model: inside a wheel, or beside the package in a clone."""
    return (_PACKAGE if is_wheel() else _PACKAGE.parent) / "reference_outputs"
