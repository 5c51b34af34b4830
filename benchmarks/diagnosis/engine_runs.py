"""Reference engines as correct engines: stored outputs, and new runs if they are installed.

Stored are float32 runs of transformers and llama.cpp, near position 0 and far, and llama.cpp on quantised files with
rounded activations. New runs are transformers in half precision and with fused attention, through `llorch.capture`,
and llama.cpp with other caches, flash attention and weights of half precision.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.diagnosis.controls import LLAMA, MODELS, QWEN2, QWEN3, Run, StageArray, prompt
from benchmarks.diagnosis.styles import WrittenDump
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
    """Run of a reference engine.

    Attributes:
        name: Name in reports.
        model: Built-in model, or type of a quantised model.
        write: Writes its dump into a folder, and the model's file if it is not built in.
        needs: Packages that it needs.
    """

    name: str
    model: str
    write: Callable[[Path], WrittenDump]
    needs: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """True if all packages are installed."""
        return all(find_spec(package) for package in self.needs)


def engine_runs() -> Iterator[EngineRun]:
    """Yield the runs of all reference engines."""
    for model in MODELS:
        for engine in ("transformers", "llamacpp"):
            for case in ("near", "far"):
                yield EngineRun(f"{engine}, stored, {case}", model, _with_args(_write_stored, engine, model, case))
    for kind, activations in QUANTISED.items():
        yield EngineRun(f"llama.cpp on {kind}, stored", kind, _with_args(_write_quantised, kind, activations))
    for model in RUN_ON:
        for dtype, attention in (
            ("float32", "sdpa"),
            ("bfloat16", "eager"),
            ("bfloat16", "sdpa"),
            ("float16", "eager"),
        ):
            run = _with_args(_run_transformers, model, dtype, attention)
            yield EngineRun(f"transformers, {dtype}, {attention}", model, run, ("torch", "transformers"))
        for name, arguments in LLAMA_CPP.items():
            yield EngineRun(f"llama.cpp, {name}", model, _with_args(_run_llamacpp, model, *arguments), ("llama_cpp",))


def _with_args(write: Callable[..., WrittenDump], *args: object) -> Callable[[Path], WrittenDump]:
    return lambda folder: write(folder, *args)


def path_of(model: str, folder: Path) -> Path:
    """Return the file of a model; write it into the folder if the model is not built in."""
    return builtin_path(model) if model in MODELS else write_model(model, folder)


# Stored --------------------------------------------------------------------------------------------------------------


@cache
def _record(model: str) -> dict:
    return json.loads((goldens_folder() / model / "golden.json").read_text())


def _write_stored(folder: Path, engine: str, model: str, case: str) -> WrittenDump:
    tokens = _record(model)["cases"][case]
    arrays = read_arrays(goldens_folder() / model / f"{engine}{SUFFIX}")
    names = ("selected_logits", "generation", "probabilities")
    arrays_of_case = [
        StageArray(0, key, array)
        for name, array in arrays.items()
        for array_case, key in [name.split("/")]
        if array_case == case and not key.startswith(names)
    ]
    passes = (Tokens(tuple(tokens["ids"]), tokens["first_position"]),)
    return Run(model, passes, tuple(arrays_of_case), {"engine": engine, "dtype": "float32"}).write(folder)


def _write_quantised(folder: Path, kind: str, activations: str) -> WrittenDump:
    tokens = _record("quantised")["case"]
    arrays = read_arrays(goldens_folder() / "quantised" / f"{kind}{SUFFIX}")
    features = {"engine": "llama.cpp", "dtype": "float32", "activations": activations}
    passes = (Tokens(tuple(tokens["ids"]), tokens["first_position"]),)
    return Run(kind, passes, tuple(StageArray(0, key, array) for key, array in arrays.items()), features).write(folder)


# Run -----------------------------------------------------------------------------------------------------------------


def _run_transformers(folder: Path, model: str, dtype: str, attention: str) -> WrittenDump:
    import torch
    from transformers import AutoModelForCausalLM

    import llorch
    from llorch.files.convert import convert

    convert(builtin_path(model), folder / "model")
    model_of_run = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, dtype), attn_implementation=attention
    )
    with llorch.capture(model_of_run) as dump, torch.no_grad():
        output = model_of_run(torch.tensor([prompt(model, 14)]), use_cache=True)
        model_of_run(torch.tensor([[5]]), past_key_values=output.past_key_values, use_cache=True)
    dump.save(folder / "dump")
    return WrittenDump(folder / "dump")


LLAMA_CPP = {  # dtype of the weights, type of the cache, flash attention
    "float16 cache": ("float32", "f16", False),
    "flash attention": ("float32", "f32", True),
    "flash attention, float16 cache": ("float32", "f16", True),
    "float16 weights": ("float16", "f32", False),
    "bfloat16 weights": ("bfloat16", "f32", False),
}


def _run_llamacpp(folder: Path, model: str, dtype: str, kv_cache: str, flash: bool) -> WrittenDump:
    import llama_cpp

    from llorch.engines import llamacpp
    from llorch.engines.llamacpp_graph import GraphCapture, GraphWatcher
    from llorch.ops.numerics import EXACT, Numerics

    switch = "LLAMA_FLASH_ATTN_TYPE_DISABLED"  # llorch's engine passes this value; it has no parameter for it
    default = getattr(llama_cpp, switch)
    numerics = Numerics("ggml", "f16") if kv_cache == "f16" else EXACT
    ids = prompt(model, 14)
    try:
        setattr(llama_cpp, switch, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else default)
        with llamacpp.LlamaCpp(builtin_path(model), numerics=numerics, dtype=dtype) as engine:  # type: ignore[arg-type]
            capture = GraphCapture(engine.config, len(ids), fused_attention=flash)
            engine._logits(ids, 0, GraphWatcher(capture))
    finally:
        setattr(llama_cpp, switch, default)
    features = {"engine": "llama.cpp", "dtype": "float32", "flash_attention": flash}
    features |= {"kv_cache": {"f16": "float16", "f32": "float32"}[kv_cache]}
    features |= {"activations": {"float16": "F16", "bfloat16": "BF16"}[dtype]} if dtype != "float32" else {}
    stage_arrays = tuple(StageArray(0, key, np.ascontiguousarray(array)) for key, array in capture.stages().items())
    return Run(model, (Tokens(tuple(ids)),), stage_arrays, features).write(folder / "dump")
