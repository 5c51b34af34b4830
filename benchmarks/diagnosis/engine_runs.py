"""Engines that others wrote, as right ones: what is stored of them, and runs of today where they are installed.

Stored are float32 runs of transformers and llama.cpp, near position 0 and far, and llama.cpp on quantised files, with
its activations rounded. Run are transformers in half precision and with fused attention, watched by `llorch.capture`,
and llama.cpp with other caches, flash attention and weights of half precision.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.diagnosis.controls import LLAMA, MODELS, QWEN2, QWEN3, Run, Shown, prompt
from benchmarks.diagnosis.styles import Written
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.goldens.store import SUFFIX, read_arrays
from llorch.runtime.builtin import builtin_path, goldens_folder
from llorch.stages.stage_ref import Tokens

QUANTISED = {
    "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q8_0", "Q5_1": "Q8_1", "Q4_K": "Q8_K", "Q6_K": "Q8_K",
    "Q4_K_M": "Q8_K", "IQ4_NL": "Q8_0", "IQ2_XS": "Q8_K",
}  # fmt: skip
RUN_ON = (LLAMA, QWEN2, QWEN3)


@dataclass(frozen=True)
class EngineRun:
    """A run of an engine that somebody else wrote.

    Attributes:
        name: For reports.
        model: Built in, or of the quantised ones.
        write: Writes its dump into a folder, beside it the model's file where that is not built in.
        needs: Packages without which it does not run.
    """

    name: str
    model: str
    write: Callable[[Path], Written]
    needs: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """True if it can run."""
        return all(find_spec(package) for package in self.needs)


def engine_runs() -> Iterator[EngineRun]:
    """Yield the runs of all engines that others wrote."""
    for model in MODELS:
        for engine in ("transformers", "llamacpp"):
            for case in ("near", "far"):
                yield EngineRun(f"{engine}, stored, {case}", model, _later(_stored, engine, model, case))
    for kind, activations in QUANTISED.items():
        yield EngineRun(f"llama.cpp on {kind}, stored", kind, _later(_quantised, kind, activations))
    for model in RUN_ON:
        for dtype, attention in (
            ("float32", "sdpa"),
            ("bfloat16", "eager"),
            ("bfloat16", "sdpa"),
            ("float16", "eager"),
        ):
            run = _later(_transformers, model, dtype, attention)
            yield EngineRun(f"transformers, {dtype}, {attention}", model, run, ("torch", "transformers"))
        for name, how in LLAMA_CPP.items():
            yield EngineRun(f"llama.cpp, {name}", model, _later(_llamacpp, model, *how), ("llama_cpp",))


def _later(write: Callable[..., Written], *args: object) -> Callable[[Path], Written]:
    return lambda folder: write(folder, *args)


def path_of(model: str, folder: Path) -> Path:
    """Find the file of a model, which is written into the folder if the model is not built in."""
    return builtin_path(model) if model in MODELS else write_model(model, folder)


# Stored --------------------------------------------------------------------------------------------------------------


@cache
def _record(model: str) -> dict:
    return json.loads((goldens_folder() / model / "golden.json").read_text())


def _stored(folder: Path, engine: str, model: str, case: str) -> Written:
    tokens = _record(model)["cases"][case]
    arrays = read_arrays(goldens_folder() / model / f"{engine}{SUFFIX}")
    names = ("selected_logits", "generation", "probabilities")
    shown = [
        Shown(0, key, array)
        for name, array in arrays.items()
        for where, key in [name.split("/")]
        if where == case and not key.startswith(names)
    ]
    passes = (Tokens(tuple(tokens["ids"]), tokens["first_position"]),)
    return Run(model, passes, tuple(shown), {"engine": engine, "dtype": "float32"}).write(folder)


def _quantised(folder: Path, kind: str, activations: str) -> Written:
    tokens = _record("quantised")["case"]
    arrays = read_arrays(goldens_folder() / "quantised" / f"{kind}{SUFFIX}")
    said = {"engine": "llama.cpp", "dtype": "float32", "activations": activations}
    passes = (Tokens(tuple(tokens["ids"]), tokens["first_position"]),)
    return Run(kind, passes, tuple(Shown(0, key, array) for key, array in arrays.items()), said).write(folder)


# Run -----------------------------------------------------------------------------------------------------------------


def _transformers(folder: Path, model: str, dtype: str, attention: str) -> Written:
    import torch
    from transformers import AutoModelForCausalLM

    import llorch
    from llorch.files.convert import convert

    convert(builtin_path(model), folder / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, dtype), attn_implementation=attention
    )
    with llorch.capture(loaded) as dump, torch.no_grad():
        made = loaded(torch.tensor([prompt(model, 14)]), use_cache=True)
        loaded(torch.tensor([[5]]), past_key_values=made.past_key_values, use_cache=True)
    dump.save(folder / "dump")
    return Written(folder / "dump")


LLAMA_CPP = {  # dtype of the weights, of the cache, and whether with flash attention
    "float16 cache": ("float32", "f16", False),
    "flash attention": ("float32", "f32", True),
    "flash attention, float16 cache": ("float32", "f16", True),
    "float16 weights": ("float16", "f32", False),
    "bfloat16 weights": ("bfloat16", "f32", False),
}


def _llamacpp(folder: Path, model: str, dtype: str, kv_cache: str, flash: bool) -> Written:
    import llama_cpp

    from llorch.engines import llamacpp
    from llorch.engines.llamacpp_graph import GraphCapture, GraphWatcher
    from llorch.ops.numerics import EXACT, Numerics

    switch = "LLAMA_FLASH_ATTN_TYPE_DISABLED"  # llorch's engine passes this value; there is no other way to turn it on
    before = getattr(llama_cpp, switch)
    numerics = Numerics("ggml", "f16") if kv_cache == "f16" else EXACT
    ids = prompt(model, 14)
    try:
        setattr(llama_cpp, switch, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else before)
        with llamacpp.LlamaCpp(builtin_path(model), numerics=numerics, dtype=dtype) as engine:  # type: ignore[arg-type]
            capture = GraphCapture(engine.config, len(ids))
            engine._logits(ids, 0, GraphWatcher(capture))
    finally:
        setattr(llama_cpp, switch, before)
    said = {"engine": "llama.cpp", "dtype": "float32", "flash_attention": flash}
    said |= {"kv_cache": {"f16": "float16", "f32": "float32"}[kv_cache]}
    said |= {"activations": {"float16": "F16", "bfloat16": "BF16"}[dtype]} if dtype != "float32" else {}
    shown = tuple(Shown(0, key, np.ascontiguousarray(array)) for key, array in capture.stages().items())
    return Run(model, (Tokens(tuple(ids)),), shown, said).write(folder / "dump")
