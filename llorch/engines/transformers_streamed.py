"""Streamed transformers model with one layer at a time in memory: the unmodified class with parameters on `meta`.

Hooks read the weights of a layer (or the head) when it is called, and drop them when the next one is called. Norm and
embedding stay. transformers' own code reads them: safetensors for a folder; for a GGUF file its name map, its row
permutation and its decoder. llorch decodes types that transformers cannot decode.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from torch import nn
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from llorch.families.table import FAMILIES
from llorch.files import Weights
from llorch.files.layerwise import LayerwiseJobs, Turn
from llorch.files.tensor_names import Weight, inventory

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_TILE = 4096  # rows that are decoded at once, to limit the memory of the float32 copy
_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # fused tensor of experts -> parts
# Function that ends this thread's turn: concurrent passes take turns after each layer, see `files.layerwise`.
_TURN: ContextVar[Turn] = ContextVar("turn", default=lambda: None)


class FolderTensors:
    """Tensors of a Hugging Face folder, read by safetensors."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Open the files of the folder."""
        index, self._dtype = path / "model.safetensors.index.json", dtype
        is_single_file = not index.exists() or (path / "model.safetensors").exists()
        names = {"model.safetensors"} if is_single_file else {*json.loads(index.read_text())["weight_map"].values()}
        files = [safe_open(path / name, framework="pt") for name in sorted(names)]
        # The model class is the text model, so tensors of a multimodal model get the names of the text model.
        self._files = {name.replace(".language_model.", "."): (file, name) for file in files for name in file.keys()}

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some rows of it, in the dtype of the run; stack experts, which files store separately."""
        if name not in self._files and (parts := _JOINED.get(name.rpartition(".")[2])):
            return torch.cat([self._stacked(name.rpartition(".")[0], part) for part in parts], dim=1)
        file, inner = self._files[name]
        tensor = file.get_tensor(inner)
        return (tensor if rows is None else tensor[rows]).to(self._dtype)

    def _stacked(self, experts: str, part: str) -> torch.Tensor:
        names = (f"{experts}.{number}.{part}.weight" for number in count())
        return torch.stack([self.read(name) for name in takewhile(self._files.__contains__, names)])


class FileTensors:
    """Tensors of a GGUF file, read by transformers' code."""

    def __init__(self, path: Path, model: nn.Module, settings: dict[str, Any], dtype: torch.dtype) -> None:
        """Open a file; `settings` are the hyperparameters that transformers read from its metadata.

        LookupError if transformers finds no name for a tensor; NotImplementedError if it cannot decode a type.
        """
        self._dtype, reader = dtype, GGUFReader(path)
        self._processor = TENSOR_PROCESSORS.get(settings["model_type"], TensorProcessor)(config=settings)
        self._names = get_gguf_hf_weights_map(model, self._processor)
        self._tensors = {self._names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in self._names}
        missing = {*parameter_names(model)} - {*self._tensors}
        if missing:
            raise LookupError(f"transformers: {path} has no {', '.join(sorted(missing))}")
        for tensor in {tensor.tensor_type: tensor for tensor in self._tensors.values()}.values():
            dequantize(tensor.data[:1], tensor.tensor_type)  # raises early for types without a decoder

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some rows of it (in the order of the file), in the dtype of the run."""
        tensor = self._tensors[name]
        data = tensor.data if rows is None else tensor.data[rows]
        tensor_rows = torch.empty((len(data), *tensor.shape[-2::-1].tolist()), dtype=self._dtype)
        for start in range(0, len(data), _TILE):
            decoded = dequantize(data[start : start + _TILE], tensor.tensor_type)
            tensor_rows[start : start + _TILE] = torch.from_numpy(np.require(decoded, requirements="W"))  # writable
        if rows is not None:
            return tensor_rows
        arguments = {"tensor_key_mapping": self._names, "parsed_parameters": {}}
        return self._processor.process(weights=tensor_rows, name=tensor.name, **arguments).weights


class LlorchTensors:
    """Tensors of a model, decoded by llorch's reader."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        """Index the weights by transformers' names."""
        self._weights, self._dtype = weights, dtype
        self._parts: dict[str, list[Weight]] = {}
        for weight in inventory(weights.config).values():
            self._parts.setdefault(weight.huggingface, []).append(weight)
        if weights.config.tie_word_embeddings:  # a model built without weights is not tied yet
            self._parts["lm_head.weight"] = [inventory(weights.config)["embed_tokens"]]

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a copy of a tensor, or of some rows, in the dtype of the run: torch needs writable arrays."""
        if name not in self._parts and name.endswith("o_proj.bias"):
            # The class has all four attention biases or none; a zero bias is exact.
            return torch.zeros(self._weights.config.hidden_size, dtype=self._dtype)
        if (path := name.split("."))[4:5] == ["experts"]:
            stacks = [self._weights.read(f"layers.{path[2]}.experts_{part}") for part in _JOINED[path[-1]]]
            stack = torch.from_numpy(np.concatenate(stacks, axis=1)).to(self._dtype)
            is_transposed = FAMILIES[self._weights.config.family].layout.transposed_experts == "modules"
            return stack.mT.contiguous() if is_transposed else stack
        first, *fused_weights = self._parts[name]
        array = self._in_transformers_layout(first)
        for weight in fused_weights:  # interleaved rows of a fused matrix of Qwen3-Next
            assert weight.in_huggingface.rows is not None
            array[weight.in_huggingface.rows.index()] = self._weights.read(weight.name)
        return torch.from_numpy(array if rows is None else array[rows]).to(self._dtype)

    def _in_transformers_layout(self, weight: Weight) -> np.ndarray:
        """Convert a weight to the array that transformers stores; if the numbers differ, in float64."""
        layout = weight.in_huggingface
        if layout.form == "less_one":
            return self._weights.read(weight.name, np.float64) - 1
        if layout.form == "logarithm":
            return np.log(-self._weights.read(weight.name, np.float64))
        array = self._weights.read(weight.name)
        if layout.rows is None:
            return array.copy() if layout.shape is None else array.reshape(layout.shape).copy()
        stored_array = np.empty(layout.shape or array.shape, array.dtype)
        stored_array[layout.rows.index()] = array
        return stored_array


Tensors = FolderTensors | FileTensors | LlorchTensors


def parameter_names(model: nn.Module) -> list[str]:
    """List the parameters of a model; tied parameters appear only under the first name."""
    return [name for name, _ in model.named_parameters()]


def without_weights(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model with parameters on `meta`, but with RoPE frequencies, which no file holds."""
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype, attn_implementation="eager")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model


class Streamed:
    """Loader that gives a model the weights of the part (a layer or the head) that runs, and drops them afterwards."""

    def __init__(
        self, model: Any, tensors: Tensors, dtype: torch.dtype, n_threads: int, progress: Callable[[str], None]
    ) -> None:
        """Prepare a model made by `without_weights`."""
        self._model, self._tensors, self._progress = model, tensors, progress
        self._tied = model.config.tie_word_embeddings
        self._readers = ThreadPoolExecutor(n_threads)  # threads, because a dispatch mode would widen the weights
        self._parts = [*(f"model.layers.{i}" for i in range(model.config.num_hidden_layers)), HEAD]
        self._empty = {part: model.get_submodule(part).state_dict() for part in self._parts}
        self._loaded_part, self._started, self._n_read, self._n_to_read = "", time.monotonic(), 0, len(self._parts)
        self._fill(FINAL_NORM)
        self._load_rows_on_demand(model.get_submodule(EMBEDDING), dtype)
        for part in self._parts:
            model.get_submodule(part).register_forward_pre_hook(partial(self._enter, part))
            model.get_submodule(part).register_forward_hook(lambda *_: _TURN.get()())

    def call_batch(self, calls: Sequence[Callable[[], Any]], *, n_passes: int) -> list[Any]:
        """Run calls layer by layer together; each call runs the model up to `n_passes` times."""

        def make_job(call: Callable[[], Any]) -> Callable[[Turn], Any]:
            def run(turn: Turn) -> Any:
                _TURN.set(turn)
                return call()

            return run

        self._started, self._n_read, self._n_to_read = time.monotonic(), 0, n_passes * len(self._parts)
        try:
            return LayerwiseJobs([make_job(call) for call in calls]).run()
        finally:
            self._drop()

    def close(self) -> None:
        """Drop the weights and end the reader threads."""
        self._drop()
        self._readers.shutdown()

    def _enter(self, part: str, _module: nn.Module, _inputs: tuple) -> None:
        """Drop the weights of the previous part and read those of `part` before it runs; report progress."""
        if part == self._loaded_part:
            return
        self._drop()
        self._report(part)
        self._fill(part)
        self._loaded_part, self._n_read = part, self._n_read + 1

    def _report(self, part: str) -> None:
        position = f"layer {self._parts.index(part)} of {len(self._parts) - 1}" if part != HEAD else "logits"
        seconds = time.monotonic() - self._started
        time_left = f", {seconds / self._n_read * (self._n_to_read - self._n_read):.0f} s left" if self._n_read else ""
        self._progress(position + time_left)

    def _fill(self, part: str) -> None:
        """Read the parameters of a part into the model; a tied head reads the embedding."""
        module = self._model.get_submodule(part)
        names = list(module.state_dict())
        source = EMBEDDING if part == HEAD and self._tied else part
        tensors = self._readers.map(self._tensors.read, [f"{source}.{name}" for name in names])
        module.load_state_dict(dict(zip(names, tensors, strict=True)), assign=True)

    def _drop(self) -> None:
        """Drop the weights of the part in memory."""
        if self._loaded_part:
            self._model.get_submodule(self._loaded_part).load_state_dict(self._empty[self._loaded_part], assign=True)
        self._loaded_part = ""

    def _load_rows_on_demand(self, module: nn.Embedding, dtype: torch.dtype) -> None:
        """Load only the embedding rows of tokens that occur; the unwritten pages of the table use no memory."""
        n_rows, width = module.num_embeddings, module.embedding_dim
        weight = torch.from_numpy(np.zeros((n_rows, width * dtype.itemsize), np.uint8)).view(dtype)
        loaded_ids: set[int] = set()
        module.load_state_dict({"weight": weight}, assign=True)

        def load_rows(_module: nn.Module, inputs: tuple) -> None:
            new_ids = sorted({*inputs[0].flatten().tolist()} - loaded_ids)
            if new_ids:
                rows = self._readers.submit(self._tensors.read, f"{EMBEDDING}.weight", new_ids).result()
                weight[new_ids] = rows
                loaded_ids.update(new_ids)

        module.register_forward_pre_hook(load_rows)
