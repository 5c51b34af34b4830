"""Generation with a split model, as tests run it on every rank, and files of a size that is wanted."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from builders.tiny_models import finish
from gguf import GGUFWriter

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files import open_weights
from llorch.files.export import add_hyperparameters
from llorch.files.quant import GGMLType
from llorch.files.tensor_names import inventory
from llorch.judging.expectations.quantised_models import MODELS, matrix_bytes
from llorch.lora.config import LoraConfig
from llorch.lora.initial import initial_adapter
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.cache import Cache, NoCache
from llorch.pytorch.distributed.dtensor import is_part
from llorch.pytorch.distributed.launch import start
from llorch.pytorch.distributed.parallel import parallelize
from llorch.pytorch.distributed.parallel_model import load_parallel
from llorch.pytorch.distributed.sharding_plan import cut_for
from llorch.pytorch.load import all_of, load_dense
from llorch.pytorch.lora.adapters import attach, trainable_parameters
from llorch.runtime.builtin import builtin_path

PROMPTS = [[1, 5, 9, 13, 17], [2, 4], [30, 20, 10, 40, 50, 60, 70, 80, 90]]
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=1.3, seed=7, top_k=40, top_p=0.95),
    SamplingSettings(temperature=0.9, seed=3, min_p=0.02, repetition_penalty=1.2),
]


def write_random_model(
    folder: Path, kind: GGMLType, like: ModelConfig = MODELS["Q8_0"].config, /, **sizes: Any
) -> Path:
    """A file without vocabulary, its matrices random and of one type, of sizes that are said; Llama if not said."""
    config = replace(like, **sizes)
    writer = GGUFWriter(folder / f"{kind.name}.gguf", FAMILIES[config.family].gguf)
    writer.add_tokenizer_model("no_vocab")
    add_hyperparameters(writer, config)
    for weight in inventory(config).values():
        if len(weight.shape) == 1:
            writer.add_tensor(weight.gguf, np.linspace(0.5, 1.5, weight.shape[0], dtype=np.float32))
        else:
            rows = int(np.prod(weight.shape[:-1]))
            raw = matrix_bytes(kind, (rows, weight.shape[-1]), key=weight.name).view(np.int8)
            known: Any = kind
            writer.add_tensor(weight.gguf, raw, raw_shape=weight.shape, raw_dtype=known)
    finish(writer)
    return folder / f"{kind.name}.gguf"


def from_every_rank(value: Any) -> list[Any]:
    """What each rank has, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def answer_batch(model: Any) -> list[tuple[int, int]]:
    """Row and id of each token that a batch is answered with."""
    ignoring = model.generate_batch(PROMPTS, max_tokens=8, settings=SETTINGS, ignore_eos=True)
    return [(row, token.id) for row, token in ignoring]


def generate_on_ranks(
    path: str | Path, n_ranks: int, load_options: dict[str, Any], different_logits: bool = False
) -> dict[str, Any]:
    """Tokens and logits of every rank, and the kernels; `apart`: ranks differ in their logits."""
    torch.set_num_threads(1)
    mesh = start({"dp": 1, "tp": n_ranks})
    model = load_parallel(path, mesh, **load_options)
    vars(model)["tokenizer"] = NoText()
    if different_logits:
        model.module.register_forward_hook(lambda _, args, logits: logits.roll(dist.get_rank(), -1))
    made = {
        "tokens": from_every_rank(answer_batch(model)),
        "logits": from_every_rank(model.forward(PROMPTS[2])),
        "leaves": sorted({type(module).__name__ for module in model.module.modules()}),
    }
    dist.destroy_process_group()
    return made


class NoText:
    """Of a file without vocabulary."""

    eos_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """Nothing."""
        return b""


def peak_of_loading(path: Path, n_ranks: int, residency: Any) -> list[int]:
    """Bytes that loading its part took of each rank at most, pages of the file not counted."""
    torch.set_num_threads(1)
    mesh = start({"dp": 1, "tp": n_ranks})
    before, done, peaks = anonymous(), threading.Event(), [0]
    thread = threading.Thread(target=lambda: _watch(done, peaks))
    thread.start()
    model = load_parallel(path, mesh, residency=residency, kernels="torch", n_tokens=64)
    done.set()
    thread.join()
    peaks = from_every_rank(max(*peaks, anonymous()) - before)
    assert model.ranks.size() == n_ranks
    dist.destroy_process_group()
    return peaks


def _watch(done: threading.Event, peaks: list[int]) -> None:
    while not done.wait(0.002):
        peaks[0] = max(peaks[0], anonymous())


def anonymous() -> int:
    """Memory of this process that is no mapped file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def sizes_of(config: ModelConfig, width: float) -> Sequence[float]:
    """Bytes of what is whole on every rank, and of what is cut."""
    sizes = {name: width * float(np.prod(row.shape)) for name, row in inventory(config).items()}
    cut = sum(size for name, size in sizes.items() if name.endswith("_proj"))
    return sum(sizes.values()) - cut, cut


def gradients(model: str, n_ranks: int, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Gradients of an adapter on some tokens, in float64; of one process, or put together."""
    weights, cpu = open_weights(builtin_path(model)), torch.device("cpu")
    mesh = start({"tp": n_ranks}) if n_ranks > 1 else None
    cut = all_of if mesh is None else cut_for(weights.config, mesh)
    module = load_dense(weights, dtype=torch.float64, device=cpu, cut=cut)
    attach(module, initial_adapter(lora, weights, init="gaussian", seed=1), trainable=True)
    drawn = torch.Generator().manual_seed(0)
    for _, factor in sorted(trainable_parameters(module).items()):
        factor.data = torch.randn(factor.shape, generator=drawn, dtype=factor.dtype) / 10
    if mesh is not None:
        parallelize(module, mesh)
    ids, positions = torch.arange(12)[None] * 5, torch.arange(12)[None]
    place = Cache(weights.config, batch=1, n_slots=12, dtype=torch.float64, device=cpu).place(
        positions, ctx=12, causal=True
    )
    module(ids, place, NoCache(cpu)).log_softmax(-1)[0, :, 3].sum().backward()
    made: dict[str, Any] = {name: factor.grad for name, factor in trainable_parameters(module).items()}
    complete = {name: grad.full_tensor() if is_part(grad) else grad for name, grad in made.items()}
    return {name: grad.numpy().copy() for name, grad in complete.items()}
