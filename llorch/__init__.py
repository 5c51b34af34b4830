"""llorch: Llama and Qwen in NumPy, every stage checked against llama.cpp and transformers.

model = llorch.load("story")                      a built-in name, a .gguf file or a Hugging Face folder
for token in model.generate("Once upon a time"):  id, text and log probability
    print(token.text, end="")
trace = {}
logits = model.forward([1, 2, 3], trace=trace)    every stage by name
print(llorch.compare(trace, other_trace))         first divergence
model = llorch.load_torch("story", device="cuda", dtype="bfloat16")    the same in torch; many prompts at once, too
model.add_adapter("pirate", "my-adapter")         a LoRA adapter, for model.generate(..., adapter="pirate")

The packages, in the order to read. Each imports only those above it. Its `__init__` names its input and its output.

    config/                 hyperparameters, from either kind of file; `stages` is the table of what is computed,
                            `places` where an array is in a run, `comparison` how far two arrays are apart
    hub/                    the file that a name means; models of the Hugging Face hub
    ops/                    one operation a file, forward and backward, the formula on top
    forward  backward       the reference, one screen each; `cache` has keys and values, `numerics` the rounding
    files/                  bytes to arrays and back: GGUF, Hugging Face folders, quantised blocks; `convert`
    families/               blocks of models that are not dense: experts, delta nets, windows
    tokenizer/              text to ids and back, chats
    sampling  generate      from logits to a token, and on; `model` loads, generates and traces
    lora/                   adapters: read, merge, export
    evaluate/               how well a model predicts a text, and how much a quantised model differs from its original
    train/                  data, loss, update, snapshots: a training run without its model
    dumps/                  values of any engine, as stages of the table
    pytorch/                all of it on torch: models, kernels in C and Triton, batches, LoRA, the training loop
    engines/                reference engines, each in a process of its own: llama.cpp, transformers, PEFT
    doctor/                 checks of an adapter, by the programs that read it
    verify/                 expected values from goldens, runners, one comparison
    diagnosis/              the first wrong stage of an engine that gave only a dump, and the mistake
    machine/                packages, processor, engines and caches of this machine, and the repair of each fault
    learn/                  lessons: a learner's function replaces llorch's and is judged as llorch's is
    serve/                  an OpenAI-compatible server for one model
    cli/                    the verbs, one a file

`llorch verify` finds a wrong line of llorch by the checkpoint of its stage. `llorch diagnose` finds the wrong stage of
another engine by its dump.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from llorch.errors import CheckpointMismatch, FormatError, MissingExtra, NonFiniteRun

if TYPE_CHECKING:
    from llorch.comparison import Difference, Report, Tolerance, compare
    from llorch.config import ModelConfig
    from llorch.dumps.recorder import Recorder
    from llorch.generate import Token
    from llorch.model import Model, load
    from llorch.pytorch.capture.capture import capture
    from llorch.pytorch.model import TorchModel, load_torch
    from llorch.sampling import SamplingSettings

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

_WHERE = {
    "compare": "comparison",
    "Difference": "comparison",
    "Report": "comparison",
    "Tolerance": "comparison",
    "ModelConfig": "config",
    "Recorder": "dumps.recorder",
    "Token": "generate",
    "Model": "model",
    "load": "model",
    "SamplingSettings": "sampling",
    "TorchModel": "pytorch.model",
    "capture": "pytorch.capture.capture",
    "load_torch": "pytorch.model",
}


def __getattr__(name: str) -> object:
    """Import on first use: `llorch --help` and `import llorch` need none of it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'llorch' has no attribute {name!r}")
    try:
        return getattr(import_module(f"llorch.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        from llorch.machine.packages import missing_extra

        raise missing_extra(error) or error from None
