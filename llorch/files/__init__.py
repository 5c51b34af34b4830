"""Files of models: bytes to arrays, and back.

In comes a path, of a GGUF file or a Hugging Face folder. Out come `Weights`: arrays by canonical name,
whatever file they are from, each loaded when it is first asked for. Opening checks that the file holds exactly the
tensors that its configuration asks for, and lists every fault at once. A tensor that is missing is never filled in
(transformers fills it with random numbers), an extra one never dropped: both mean that the file and the configuration
speak of different models. In the order to read:

    names        which weights a model has, what they are called where, the row order of q and k
    layout       how a file holds what is no tensor of its own: experts, delta nets, gains less one
    mapped       a file opened once, mapped, watched for change; `metadata` and `gguf` read a GGUF file through it,
                 `strict_json`, `safetensors` and `folder` a Hugging Face folder
    quant        the types of ggml, decoded by `blocks/`; `packed` is a tensor as stored, `matrix` multiplies with one
    weights      the arrays, and matrices that multiply themselves; `opening` finds them and checks that all are there
    residency    whether matrices lie decoded or packed while a model runs
    encode       float32 to those types; `export` and `export_huggingface` write whole models, `new_file` puts what is
                 written in its place, complete or not at all
"""

from llorch.files.folder import SafetensorsFolder
from llorch.files.gguf import GGUFFile, StringArray, TensorInfo, open_gguf
from llorch.files.opening import open_weights
from llorch.files.safetensors import SafetensorsFile, open_safetensors
from llorch.files.weights import ExpertStack, LayerWeights, Slot, Weights

__all__ = [
    "ExpertStack", "GGUFFile", "LayerWeights", "SafetensorsFile", "SafetensorsFolder", "Slot", "StringArray",
    "TensorInfo", "Weights", "open_gguf", "open_safetensors", "open_weights",
]  # fmt: skip
