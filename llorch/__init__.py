"""llorch: Llama and Qwen in NumPy, every stage checked against llama.cpp and transformers.

import llorch

model = llorch.load("story")                      a built-in name, a .gguf file or a Hugging Face folder
for token in model.generate("Once upon a time"):  id, text and log probability
    print(token.text, end="")
trace = {}
logits = model.forward([1, 2, 3], trace=trace)    every stage by name
print(llorch.compare(trace, other_trace))         first divergence
"""

from llorch.compare import Difference, Report, Tolerance, compare
from llorch.config import ModelConfig
from llorch.errors import CheckpointMismatch, FormatError, MissingExtra
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
