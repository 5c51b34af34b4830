"""A transformers model of which one layer at a time is in memory: the unmodified class, its parameters on `meta`.

The weights of a layer are read when it is called and dropped when the next one is. They come from the code by which
transformers reads: safetensors of a folder, and of a GGUF file its map of names, its reordering of rows and the decoder
that it calls. Types that this does not know are decoded by us.
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
_TILE = 4096  # rows that are decoded at once: float32 is no more than a step on the way to the dtype of the run
_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of the experts of a layer
_TURN: ContextVar[Turn] = ContextVar("turn", default=lambda: None)  # of the pass that this thread computes


class FolderTensors:
    """Of a Hugging Face folder, as safetensors gives them."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Open its files."""
        index, self._dtype = path / "model.safetensors.index.json", dtype
        whole = not index.exists() or (path / "model.safetensors").exists()
        names = {"model.safetensors"} if whole else {*json.loads(index.read_text())["weight_map"].values()}
        files = [safe_open(path / name, framework="pt") for name in sorted(names)]
        # The text part of a model that sees goes by the names that it has alone.
        self._files = {name.replace(".language_model.", "."): (file, name) for file in files for name in file.keys()}

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some rows of it, in the dtype of the run.

        Experts are stored one by one, and the reader joins them.
        """
        if name not in self._files and (parts := _JOINED.get(name.rpartition(".")[2])):
            return torch.cat([self._stacked(name.rpartition(".")[0], part) for part in parts], dim=1)
        file, inner = self._files[name]
        tensor = file.get_tensor(inner)
        return (tensor if rows is None else tensor[rows]).to(self._dtype)

    def _stacked(self, experts: str, part: str) -> torch.Tensor:
        names = (f"{experts}.{number}.{part}.weight" for number in count())
        return torch.stack([self.read(name) for name in takewhile(self._files.__contains__, names)])


class FileTensors:
    """Of a GGUF file, as transformers reads it."""

    def __init__(self, path: Path, model: nn.Module, settings: dict[str, Any], dtype: torch.dtype) -> None:
        """Open a file; `settings` are what transformers understood of its metadata.

        Raises:
            LookupError: It does not have every tensor of the model under a name that transformers knows.
            NotImplementedError: It holds a type that transformers does not decode.
        """
        self._dtype, reader = dtype, GGUFReader(path)
        self._processor = TENSOR_PROCESSORS.get(settings["model_type"], TensorProcessor)(config=settings)
        self._names = get_gguf_hf_weights_map(model, self._processor)
        self._found = {self._names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in self._names}
        missing = {*named_once(model)} - {*self._found}
        if missing:
            raise LookupError(f"transformers: {path} has no {', '.join(sorted(missing))}")
        for tensor in {tensor.tensor_type: tensor for tensor in self._found.values()}.values():
            dequantize(tensor.data[:1], tensor.tensor_type)

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some rows of it (in the order of the file), in the dtype of the run."""
        tensor = self._found[name]
        data = tensor.data if rows is None else tensor.data[rows]
        out = torch.empty((len(data), *tensor.shape[-2::-1].tolist()), dtype=self._dtype)
        for at in range(0, len(data), _TILE):
            decoded = dequantize(data[at : at + _TILE], tensor.tensor_type)
            out[at : at + _TILE] = torch.from_numpy(np.require(decoded, requirements="W"))  # not a view of the file
        if rows is not None:
            return out
        known = {"tensor_key_mapping": self._names, "parsed_parameters": {}}
        return self._processor.process(weights=out, name=tensor.name, **known).weights


class OurTensors:
    """As our reader decodes them."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        """Name them as transformers does."""
        self._weights, self._dtype = weights, dtype
        self._parts: dict[str, list[Weight]] = {}
        for weight in inventory(weights.config).values():
            self._parts.setdefault(weight.huggingface, []).append(weight)
        if weights.config.tie_word_embeddings:  # not yet tied in a model that is made without weights
            self._parts["lm_head.weight"] = [inventory(weights.config)["embed_tokens"]]

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some rows of it, in the dtype of the run.

        The result is a copy, because torch wants to write to it.
        """
        if name not in self._parts and name.endswith("o_proj.bias"):
            # These classes have all four biases or none; adding zero is exact.
            return torch.zeros(self._weights.config.hidden_size, dtype=self._dtype)
        if (place := name.split("."))[4:5] == ["experts"]:
            stacks = [self._weights.read(f"layers.{place[2]}.experts_{one}") for one in _JOINED[place[-1]]]
            stack = torch.from_numpy(np.concatenate(stacks, axis=1)).to(self._dtype)
            turned = FAMILIES[self._weights.config.family].layout.transposed_experts == "modules"
            return stack.mT.contiguous() if turned else stack
        first, *others = self._parts[name]
        array = self._as_theirs(first)
        for weight in others:  # of Qwen3-Next, whose rows take turns
            assert weight.in_huggingface.rows is not None
            array[weight.in_huggingface.rows.index()] = self._weights.read(weight.name)
        return torch.from_numpy(array if rows is None else array[rows]).to(self._dtype)

    def _as_theirs(self, weight: Weight) -> np.ndarray:
        """Convert a weight to the array that transformers stores, in float64 where the numbers differ."""
        layout = weight.in_huggingface
        if layout.form == "less_one":
            return self._weights.read(weight.name, np.float64) - 1
        if layout.form == "logarithm":
            return np.log(-self._weights.read(weight.name, np.float64))
        array = self._weights.read(weight.name)
        if layout.rows is None:
            return array.copy() if layout.shape is None else array.reshape(layout.shape).copy()
        whole = np.empty(layout.shape or array.shape, array.dtype)
        whole[layout.rows.index()] = array
        return whole


Tensors = FolderTensors | FileTensors | OurTensors


def named_once(model: nn.Module) -> list[str]:
    """List the parameters of a model; tied parameters appear once, under the first name."""
    return [name for name, _ in model.named_parameters()]


def without_weights(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model with parameters on `meta`. The frequencies of RoPE, which no file holds, are computed."""
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype, attn_implementation="eager")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model


class Streamed:
    """Gives a model the weights of the part that runs, and takes them away again."""

    def __init__(
        self, model: Any, tensors: Tensors, dtype: torch.dtype, n_threads: int, tell: Callable[[str], None]
    ) -> None:
        """Prepare a model `without_weights`."""
        self._model, self._tensors, self._tell = model, tensors, tell
        self._tied = model.config.tie_word_embeddings
        self._readers = ThreadPoolExecutor(n_threads)  # in their threads no dispatch mode widens what is read
        self._parts = [*(f"model.layers.{i}" for i in range(model.config.num_hidden_layers)), HEAD]
        self._empty = {part: model.get_submodule(part).state_dict() for part in self._parts}
        self._held, self._began, self._n_read, self._n_to_read = "", time.monotonic(), 0, len(self._parts)
        self._fill(FINAL_NORM)
        self._hold_no_rows(model.get_submodule(EMBEDDING), dtype)
        for part in self._parts:
            model.get_submodule(part).register_forward_pre_hook(partial(self._enter, part))
            model.get_submodule(part).register_forward_hook(lambda *_: _TURN.get()())

    def call_batch(self, calls: Sequence[Callable[[], Any]], *, n_passes: int) -> list[Any]:
        """Make calls that go through the model, each up to `n_passes` times, layer by layer."""

        def job(call: Callable[[], Any]) -> Callable[[Turn], Any]:
            def run(turn: Turn) -> Any:
                _TURN.set(turn)
                return call()

            return run

        self._began, self._n_read, self._n_to_read = time.monotonic(), 0, n_passes * len(self._parts)
        try:
            return LayerwiseJobs([job(call) for call in calls]).run()
        finally:
            self._drop()

    def close(self) -> None:
        """Drop the weights and end the threads."""
        self._drop()
        self._readers.shutdown()

    def _enter(self, part: str, _module: nn.Module, _inputs: tuple) -> None:
        """Load the weights of a part before it runs, in place of those of the part before."""
        if part == self._held:
            return
        self._drop()
        self._say(part)
        self._fill(part)
        self._held, self._n_read = part, self._n_read + 1

    def _say(self, part: str) -> None:
        place = f"layer {self._parts.index(part)} of {len(self._parts) - 1}" if part != HEAD else "logits"
        seconds = time.monotonic() - self._began
        left = f", {seconds / self._n_read * (self._n_to_read - self._n_read):.0f} s left" if self._n_read else ""
        self._tell(place + left)

    def _fill(self, part: str) -> None:
        """Read the parameters of a part into the model; a tied head reads the embedding."""
        module = self._model.get_submodule(part)
        names = list(module.state_dict())
        tied = EMBEDDING if part == HEAD and self._tied else part
        read = self._readers.map(self._tensors.read, [f"{tied}.{name}" for name in names])
        module.load_state_dict(dict(zip(names, read, strict=True)), assign=True)

    def _drop(self) -> None:
        """Free the weights of the part in memory."""
        if self._held:
            self._model.get_submodule(self._held).load_state_dict(self._empty[self._held], assign=True)
        self._held = ""

    def _hold_no_rows(self, module: nn.Embedding, dtype: torch.dtype) -> None:
        """Let the embedding have the rows of the tokens that it is given: memory that is not written takes no room."""
        n_rows, width = module.num_embeddings, module.embedding_dim
        weight = torch.from_numpy(np.zeros((n_rows, width * dtype.itemsize), np.uint8)).view(dtype)
        known: set[int] = set()
        module.load_state_dict({"weight": weight}, assign=True)

        def look_up(_module: nn.Module, inputs: tuple) -> None:
            new = sorted({*inputs[0].flatten().tolist()} - known)
            if new:
                rows = self._readers.submit(self._tensors.read, f"{EMBEDDING}.weight", new).result()
                weight[new] = rows
                known.update(new)

        module.register_forward_pre_hook(look_up)
