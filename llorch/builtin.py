"""The built-in models and their goldens: where the files lie in a wheel and in a clone."""

from pathlib import Path

BUILTIN = ("micro-llama", "micro-llama3", "micro-qwen2", "micro-qwen3", "story")
_PACKAGE = Path(__file__).parent


def builtin_path(name: str) -> Path:
    """The file of a built-in model.

    Args:
        name: One of `BUILTIN`.

    Returns:
        Its GGUF file.

    Raises:
        FileNotFoundError: There is no built-in model of that name.
    """
    if name not in BUILTIN:
        raise FileNotFoundError(
            f"model {name!r}: no such file or folder, and not a built-in model ({', '.join(BUILTIN)})"
        )
    return _PACKAGE / "models" / f"{name}.gguf"


def goldens_folder() -> Path:
    """The folder with one folder of goldens per built-in model: inside a wheel, or beside the package in a clone."""
    installed = _PACKAGE / "reference_outputs"
    return installed if installed.is_dir() else _PACKAGE.parent / "reference_outputs"
