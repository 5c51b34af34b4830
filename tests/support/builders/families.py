"""The table of families in tests, and random models: a folder by transformers, its GGUF file by llama.cpp.

A family is a row of `FAMILIES`. Each test of `tests/conformance` then runs on it, and those elsewhere that take their
families from here.

`random_folder` and `twin` need transformers; `twin` needs llama.cpp's converter too, in `LLORCH_LLAMACPP`: it is not
part of any package. Our own export never stands in for it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch.engines import EngineName
from llorch.families.table import FAMILIES as TABLE
from llorch.runtime.builtin import BUILTIN

BOTH: tuple[EngineName, ...] = ("llamacpp", "transformers")
TRANSFORMERS: tuple[EngineName, ...] = ("transformers",)
# Every dimension is another number.
COMMON: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 104, "num_hidden_layers": 3,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_DENSE = {"intermediate_size": 80}
_EXPERTS = {"moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3}
_SHARED = {"shared_expert_intermediate_size": 56}
# llama.cpp computes heads whose keys are as wide as their values, no others.
_HYBRID = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 12, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_MROPE = {"rope_theta": 1e5, "rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MROPE_OF_EYES = _MROPE | {"partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}
_OTHER_BIASES = {"attention_bias": False, "attention_out_bias": True}
_ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48}
_LLAMA4_VISION = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16,
}  # fmt: skip
_DEEPSTACK = {"deepstack_visual_indexes": [], "num_position_embeddings": 16}


@dataclass(frozen=True, kw_only=True)
class RandomFamily:
    """A row: random models of a family, and what tests do with them.

    Attributes:
        config: Keys of the configuration, beside `COMMON`.
        vision: Keys of the part that sees, where the family has one.
        small: Further keys of a model of two layers that has all operations of the family, for finite differences. None
            where another small model has them.
        gradients: Further keys of the models whose gradients PEFT judges, by a name.
        engine_cases: Further keys of the models that engines judge, by a name; and the engines.
    """

    config: Mapping[str, Any]
    vision: Mapping[str, Any] = field(default_factory=lambda: _VISION | _DEEPSTACK)
    small: Mapping[str, Any] | None = None
    gradients: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    engine_cases: Mapping[str, tuple[Mapping[str, Any], Sequence[EngineName]]] = field(
        default_factory=lambda: {"": ({}, BOTH)}
    )


FAMILIES: dict[str, RandomFamily] = {
    "qwen2_moe": RandomFamily(
        config=_DENSE | _EXPERTS | _SHARED, small={"num_hidden_layers": 2, "mlp_only_layers": [0]},
        gradients={"": {}, "normalised": {"norm_topk_prob": True}},
    ),
    "qwen3_moe": RandomFamily(
        config=_DENSE | _EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
        gradients={"": {"mlp_only_layers": [0]}},
    ),
    "qwen3_next": RandomFamily(
        config=_DENSE | _EXPERTS | _SHARED | _HYBRID | {"partial_rotary_factor": 0.25}, small=_ONE_OF_EACH,
    ),
    "qwen3_5": RandomFamily(config=_DENSE | _HYBRID | {"rope_parameters": _MROPE}),
    "qwen3_5_moe": RandomFamily(
        config=_EXPERTS | _SHARED | _HYBRID | {"rope_parameters": _MROPE}, small=_ONE_OF_EACH,
    ),
    "qwen2": RandomFamily(
        config=_DENSE,
        engine_cases={"": ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, TRANSFORMERS)},
    ),
    "mistral": RandomFamily(
        config=_DENSE | {"sliding_window": None, "head_dim": 16},
        small={"num_hidden_layers": 2, "sliding_window": 5}, gradients={"": {"sliding_window": 9}},
        engine_cases={"": ({"sliding_window": 9, "num_hidden_layers": 2}, TRANSFORMERS)},
    ),
    "smollm3": RandomFamily(
        config=_DENSE | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        small={"num_hidden_layers": 2, "no_rope_layers": [0, 1]},
        engine_cases={"": ({}, BOTH), "window": ({"use_sliding_window": True, "sliding_window": 9}, TRANSFORMERS)},
    ),
    "seed_oss": RandomFamily(
        config=_DENSE | {"head_dim": 16}, gradients={"": {}, "other biases": _OTHER_BIASES},
        engine_cases={"": ({}, BOTH), "other biases": (_OTHER_BIASES, TRANSFORMERS)},
    ),
    "ministral3": RandomFamily(
        config=_DENSE | {"head_dim": 16, "rope_parameters": _YARN}, small={"num_hidden_layers": 2},
    ),
    "llama4": RandomFamily(
        config={
            "intermediate_size": 40, "intermediate_size_mlp": 80, "num_local_experts": 5, "num_hidden_layers": 4,
            "head_dim": 16, "interleave_moe_layer_step": 2,
        },
        vision=_LLAMA4_VISION,
        engine_cases={
            "": ({"max_position_embeddings": 2**14}, BOTH),  # far: from 8188 on, where a chunk begins
            "chunks": ({"attention_chunk_size": 16, "floor_scale": 8}, TRANSFORMERS),
            "without norm": ({"use_qk_norm": False, "num_experts_per_tok": 2}, TRANSFORMERS),
        },
    ),
    "qwen2_5_vl": RandomFamily(
        config=_DENSE | {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
        vision=_VISION | {"fullatt_block_indexes": [0]}, engine_cases={"": ({}, TRANSFORMERS)},
    ),
    "qwen3_vl": RandomFamily(config=_DENSE | {"head_dim": 16, "rope_parameters": _MROPE_OF_EYES}),
    "qwen3_vl_moe": RandomFamily(config=_DENSE | _EXPERTS | {"head_dim": 16, "rope_parameters": _MROPE_OF_EYES}),
}  # fmt: skip
SMALL = {name: family.small for name, family in FAMILIES.items() if family.small is not None}
HYBRIDS = tuple(name for name in FAMILIES if TABLE[name].delta_net)
WHOLE = tuple(name for name in FAMILIES if TABLE[name].multimodal_type)  # text parts of models that see
WITH_TEXT_CLASS = tuple(name for name in WHOLE if not TABLE[name].written_as)  # transformers has a class of text alone
MICRO = tuple(name for name in BUILTIN if name.startswith("micro"))  # small built-in models of dense families


def labelled(column: str) -> dict[str, tuple[str, Any]]:
    """Name every model of a column, `gradients` or `engine_cases`: the family, and what the column has for it."""
    return {
        f"{name} {label}".strip(): (name, own)
        for name, family in FAMILIES.items()
        for label, own in getattr(family, column).items()
    }


def random_folder(family: str, path: Path, seed: int, *, nested: bool = False, **overrides: Any) -> Path:
    """Write a Hugging Face folder of a random model by transformers itself; overrides are keys of its configuration.

    `nested` writes the whole model with eyes, whose text part is the family.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    row, facts = FAMILIES[family], TABLE[family]
    name, values = facts.classes, COMMON | dict(row.config) | overrides
    nested = nested or not hasattr(transformers, f"{name}ForCausalLM")
    if facts.sections == "halves" and "rope_parameters" not in overrides:  # transformers cuts the heads by these
        half = values["hidden_size"] // values["num_attention_heads"] // 2
        values["rope_parameters"] = values["rope_parameters"] | {"mrope_section": [half - half // 2, half // 2, 0]}
    if nested:
        whole: Any = getattr(transformers, f"{name}Config")
        tied = {"tie_word_embeddings": values.get("tie_word_embeddings", False)}
        config = whole(text_config=values, vision_config=dict(row.vision), **tied)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    else:
        text = f"{name}TextConfig" if facts.multimodal_type else f"{name}Config"
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, text)(**values))
    _randomise(model, np.random.default_rng(seed))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    if facts.layout.transposed_experts == "files":
        turn_experts(path)
    return path


def turn_experts(path: Path) -> None:
    """Store experts as in published folders, which transformers 4 wrote: (experts, in, out)."""
    from safetensors.numpy import load_file, save_file

    file = path / "model.safetensors"
    tensors = {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if ".experts." in name else array
        for name, array in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def _randomise(model: Any, rng: np.random.Generator) -> None:
    """Numbers as a trained model has them: no gain is one, no bias zero, matrices of 0.02 to 0.1."""
    import torch

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            draw = rng.standard_normal(tuple(tensor.shape)).astype(np.float32)
            if name.endswith("A_log"):
                new = np.log(rng.uniform(0.01, 16, tensor.shape)).astype(np.float32)
            elif name.endswith("dt_bias"):
                steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), tensor.shape))
                new = (steps + np.log(-np.expm1(-steps))).astype(np.float32)  # the inverse of softplus
            elif "norm" in name and tensor.ndim == 1:
                new = tensor.numpy() + 0.2 * draw  # 1, or 0 where the gain is 1 + w
            elif tensor.ndim == 1:
                new = 0.1 * draw
            else:
                scale = 0.3 if "conv1d" in name else 0.3 if name.endswith((".gate.weight", ".router.weight")) else 0.08
                new = scale * draw
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(new, np.float32)))


_CONVERT = """
import sys
from pathlib import Path
tree, folder, target, kind = sys.argv[1:]
sys.path[:0] = [tree + "/gguf-py", tree]
import gguf
from conversion import ModelBase, TextModel, ModelType, get_model_architecture, get_model_class
from conversion.llama import LlamaModel
def set_vocab(self):
    self.gguf_writer.add_tokenizer_model("no_vocab")
    if not isinstance(self, LlamaModel):
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])
hparams = ModelBase.load_hparams(Path(folder), False)
found = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
for one in (found, getattr(found, "Ministral3Model", found)):
    one.set_vocab, one.no_mtp = set_vocab, True
found(Path(folder), getattr(gguf.LlamaFileType, kind), Path(target), eager=True).write()
"""


def twin(folder: Path, path: Path, *, kind: str = "ALL_F32") -> Path:
    """Make the GGUF file of a folder, without a vocabulary, by llama.cpp's own converter; skips the test without it."""
    tree = os.environ.get("LLORCH_LLAMACPP")
    if not tree:
        pytest.skip("NOT RUN: LLORCH_LLAMACPP is not set (tests/support/fetch_vocabularies.py gets the converter)")
    command = [sys.executable, "-c", _CONVERT, tree, str(folder), str(path), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert path.exists(), done.stderr[-3000:]
    return path
