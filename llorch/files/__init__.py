"""Files of models: bytes to arrays, and back.

Input: the path of a GGUF file or a Hugging Face folder. Output: `Weights`, arrays by canonical name, each loaded at
first use. Opening checks that the file has exactly the tensors of its configuration, and lists every fault at once.
llorch fills in no missing tensor and drops no extra one, because both mean that the file and the configuration describe
different models. The order to read:

    tensor_names    the weights of a model, their names in each format, the row order of q and k
    tensor_storage  layouts of weights that are not one tensor each: experts, delta nets, norm weights with an offset
    mapped          a memory-mapped file, checked for changes; `metadata` and `gguf` read a GGUF file, `strict_json`,
                    `safetensors` and `folder` a Hugging Face folder; quantised/ reads quantised folders; `foreign`
                    recognises other formats and failed downloads
    quant           ggml types, decoded by `blocks/`, and encoded; `packed` is a stored tensor, `matrix` its product,
                    in C if `compiled` supports it
    zeros           search for zeros, which an interrupted download leaves in a file
    weights         the arrays and matrices of a model; `opening` checks that the file is complete
    residency       matrices decoded or packed while a model runs; `layerwise` runs passes one layer at a time
    export          writes a GGUF file (`export_blocks` keeps blocks), `export_huggingface` a folder;
                    `new_file` writes files atomically
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
