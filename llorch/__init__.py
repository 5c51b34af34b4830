"""llorch: Llama and Qwen in NumPy, every stage checked against llama.cpp and transformers.

model = llorch.load("story")                      a built-in name, a .gguf file or a Hugging Face folder
for token in model.generate("Once upon a time"):  id, text and log probability
    print(token.text, end="")
trace = {}
logits = model.forward([1, 2, 3], trace=trace)    every stage by name
print(llorch.compare(trace, other_trace))         first divergence
"""

from importlib import import_module
from typing import TYPE_CHECKING

from llorch.compare import Difference, Report, Tolerance, compare  # not lazy: the module has the function's name
from llorch.errors import CheckpointMismatch, FormatError, MissingExtra

if TYPE_CHECKING:
    from llorch.config import ModelConfig
    from llorch.generate import Token
    from llorch.model import Model, load
    from llorch.sampling import SamplingSettings

__version__ = "0.1.0"

__all__ = [
    "CheckpointMismatch",
    "Difference",
    "FormatError",
    "MissingExtra",
    "Model",
    "ModelConfig",
    "Report",
    "SamplingSettings",
    "Token",
    "Tolerance",
    "compare",
    "load",
]

_WHERE = {
    "ModelConfig": "config",
    "Token": "generate",
    "Model": "model",
    "load": "model",
    "SamplingSettings": "sampling",
}


def __getattr__(name: str) -> object:
    """Import on first use: `llorch --help` and `import llorch` need none of it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'llorch' has no attribute {name!r}")
    return getattr(import_module(f"llorch.{_WHERE[name]}"), name)
