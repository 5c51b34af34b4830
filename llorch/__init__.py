"""llorch: Llama and Qwen in NumPy, every stage checked against llama.cpp and transformers.

model = llorch.load("story")                      a built-in name, a .gguf file or a Hugging Face folder
for token in model.generate("Once upon a time"):  id, text and log probability
    print(token.text, end="")
trace = {}
logits = model.forward([1, 2, 3], trace=trace)    every stage by name
print(llorch.compare(trace, other_trace))         first divergence
model = llorch.load_torch("story", device="cuda", dtype="bfloat16")    the same model in torch, with batched prompts
model.add_adapter("pirate", "my-adapter")         a LoRA adapter, for model.generate(..., adapter="pirate")

The packages, in the order to read. A package imports only the packages above it.

    llorch/
      runtime/            errors, child processes, memory, threads, names of built-in models
      families/           one file per model family; config.py has the hyperparameters
      stages/             the stage table, references to arrays of a run, differences
      ops/                one operation per file, with its backward
      files/              GGUF, Hugging Face folders, quantised blocks; tokenizer/, hub/, convert.py
      lora/               adapters as arrays and files
      model/              the model in NumPy: forward.py, backward.py, blocks/, cache.py, generate.py
      training/           data, loss, optimizer and snapshots of a training run, without torch
      pytorch/            the model on torch: models/, kernels/, distributed/, serving/, train/
      engines/            llama.cpp, transformers, PEFT, each in its own process; capture/, dumps/
      judging/            compares every stage: goldens/, expectations/, tolerances/, runners/; files: source/
      diagnosis/          finds the first wrong stage of another engine, and its cause
      apps/               learn/, serve/, evaluate/, bench/, doctor/
      cli/                the command line, one verb per file
    checkpoints/          lessons and guides; how_to/ adds a family, a stage, a mistake
    reference_outputs/    goldens, and the scripts that make them
    tests/                llorch/ops/rope.py is tested by tests/ops/test_rope.py
    benchmarks/           measurements, the atlas of other engines, injected bugs

`llorch verify` checks every stage of llorch. `llorch diagnose` finds the wrong stage of another engine in its dump.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from llorch.runtime.errors import CheckpointMismatch, FormatError, MissingExtra, NonFiniteRun

if TYPE_CHECKING:
    from llorch.engines.capture.capture import capture
    from llorch.engines.dumps.recorder import Recorder
    from llorch.families.config import ModelConfig
    from llorch.model.generate import Token
    from llorch.model.model import Model, load
    from llorch.ops.sampling import SamplingSettings
    from llorch.pytorch.model import TorchModel, load_torch
    from llorch.stages.comparison import Difference, Report, Tolerance, compare

__version__ = "0.1.0"

__all__ = [
    "CheckpointMismatch",
    "Difference",
    "FormatError",
    "MissingExtra",
    "Model",
    "ModelConfig",
    "NonFiniteRun",
    "Recorder",
    "Report",
    "SamplingSettings",
    "Token",
    "Tolerance",
    "TorchModel",
    "capture",
    "compare",
    "load",
    "load_torch",
]

_MODULES = {
    "compare": "stages.comparison",
    "Difference": "stages.comparison",
    "Report": "stages.comparison",
    "Tolerance": "stages.comparison",
    "ModelConfig": "families.config",
    "Recorder": "engines.dumps.recorder",
    "Token": "model.generate",
    "Model": "model.model",
    "load": "model.model",
    "SamplingSettings": "ops.sampling",
    "TorchModel": "pytorch.model",
    "capture": "engines.capture.capture",
    "load_torch": "pytorch.model",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `import llorch` and `llorch --help` are fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'llorch' has no attribute {name!r}")
    try:
        return getattr(import_module(f"llorch.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        from llorch.apps.doctor.machine.packages import missing_extra

        raise missing_extra(error) or error from None
