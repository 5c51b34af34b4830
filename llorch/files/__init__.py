"""Files of models: bytes to arrays, and back.

Input: the path of a GGUF file or a Hugging Face folder. Output: `Weights`, arrays by canonical name, each loaded when
it is first asked for. Opening checks that the file holds exactly the tensors that its configuration asks for, and lists
every fault at once. llorch fills in no missing tensor and drops no extra one, because both mean that the file and the
configuration describe different models. The order to read:

    tensor_names    the weights of a model, their names in each format, the row order of q and k
    tensor_storage  how a file holds weights that are no tensors: experts, delta nets, gains less one
    mapped          a file opened once, mapped, watched for change; `metadata` and `gguf` read a GGUF file through it,
                    `strict_json`, `safetensors` and `folder` a Hugging Face folder; quantised/ reads quantised folders;
                    `foreign` knows what a failed download leaves in place of a file
    quant           the types of ggml, decoded by `blocks/`, and encoded; `packed` is a tensor as stored, and `matrix`
                    multiplies
    zeros           the search for zeros in a file whose download was interrupted
    weights         the arrays, and matrices that multiply themselves; `opening` checks that all are there
    residency       matrices decoded or packed while a model runs; `layerwise` runs passes one layer at a time
    export          writes a GGUF file (`export_blocks` keeps blocks), `export_huggingface` a folder;
                    `new_file` puts a complete file in its place
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
