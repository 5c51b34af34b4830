"""A batch, and what a torch model makes of it: what adapters add, logits, loss and gradients, in ours and in PEFT's."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from builders.random_adapters import EVERY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llorch.files import open_weights
from llorch.lora.adapter import Adapter
from llorch.lora.targets import LoraTarget
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.load import load_dense
from llorch.pytorch.train.forward import hidden_states
from llorch.runtime.builtin import builtin_path
from llorch.training.batch import Batch

CPU = torch.device("cpu")
ALL = EVERY
SETTINGS: Mapping[str, dict[str, Any]] = {
    "lora": {"target_modules": ("q_proj", "v_proj")},
    "all linears": {"target_modules": ALL},
    "rslora": {"target_modules": ("k_proj", "down_proj"), "use_rslora": True},
    "dora": {"target_modules": ALL, "use_dora": True},
    "patterns": {
        "target_modules": ("q_proj", "v_proj", "up_proj"),
        "rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"q_proj": 1.5},
    },
    "embedding and head": {"target_modules": ("embed_tokens", "lm_head", "o_proj")},
    "dora on embedding and head": {"target_modules": ("embed_tokens", "lm_head"), "use_dora": True},
}


def base(name: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A built-in model on the CPU, without kernels."""
    return load_dense(open_weights(builtin_path(name)), dtype=dtype, device=CPU)


def batch(vocab_size: int = 340, rows: int = 2, seq: int = 9) -> Batch:
    """Random ids, all learned."""
    ids = np.random.default_rng(5).integers(0, vocab_size, (rows, seq))
    positions = np.broadcast_to(np.arange(seq), ids.shape).copy()
    return Batch(ids, ids, positions, np.zeros_like(ids), np.arange(rows))


def logits_of(module: CausalLM, of: Batch) -> Tensor:
    """Logits of every token, with their graph."""
    return module.lm_head(hidden_states(module, of, CPU))


def loss_of(logits: Tensor, of: Batch) -> Tensor:
    """Mean over the tokens after the first."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide[:, :-1].flatten(0, 1), torch.from_numpy(of.labels[:, 1:]).flatten())


@contextmanager
def record_deltas(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record what adapters add: the output of each module less that of its base."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            parts: Any = {"": module, ".base": module.get_submodule("base_layer")}
            for end, part in parts.items():

                def keep(_module: nn.Module, _inputs: tuple, output: Tensor, key: str = name + end) -> None:
                    seen[key] = output.detach()

                hooks.enter_context(part.register_forward_hook(keep))
        yield seen
    for name in modules:
        seen[name] = seen[name] - seen.pop(f"{name}.base")


def peft_name(flat: str, targets: Mapping[str, LoraTarget]) -> str:
    """PEFT's name of a tensor of an adapter, in its model."""
    name, _, kind = flat.rpartition(".")
    target = targets[name]
    embedding = f"lora_embedding_{kind[-1]}.default"
    ends = {"lora_A": "lora_A.default.weight", "lora_B": "lora_B.default.weight"}
    ends = {key: embedding if target.is_embedding else end for key, end in ends.items()}
    ends["magnitude"] = "lora_magnitude_vector.default.weight"
    return f"base_model.model.{target.path}.{ends[kind]}"


def attach_in_peft(name: str, adapter: Adapter, **settings: Any) -> Any:
    """A built-in model in transformers with an adapter in PEFT, in evaluation mode."""
    import peft

    from llorch.engines.transformers import Transformers

    config: Any = {"r": 3, "lora_alpha": 5.0} | settings
    config["target_modules"] = list(config["target_modules"])
    base = Transformers(builtin_path(name))._model
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    theirs = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    ours = {peft_name(flat, adapter.targets): array for flat, array in adapter.flat().items()}
    assert {key: tuple(p.shape) for key, p in theirs.items()} == {key: array.shape for key, array in ours.items()}
    with torch.no_grad():
        for key, parameter in theirs.items():
            parameter.copy_(torch.from_numpy(ours[key]))
    return model
