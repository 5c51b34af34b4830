"""ONNX Runtime GenAI: its model builder makes a graph of the folder, its generator runs it.

It shows the logits and, where the builder is asked for them, what goes into the last matrix.
"""
# pyright: basic, reportMissingImports=false

from typing import Any

import onnxruntime_genai as og
from harness import HarnessRun, answer
from onnxruntime_genai.models.builder import create_model, parse_extra_options


def load(run: HarnessRun) -> og.Generator:
    """Build, then open what was written."""
    folder, dtype = f"{run.scratch}/onnxruntime_genai", {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    asked = (run.model, run.model, folder, dtype[run.options.get("dtype", "float32")], "cpu", f"{run.scratch}/cache")
    create_model(*asked, **parse_extra_options(*asked, ["include_hidden_states=true"]))
    model = og.Model(folder)
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=sum(map(len, run.parts)) + 1)
    return og.Generator(model, params)


def compute(engine: og.Generator, run: HarnessRun, dump: Any) -> None:
    """All passes: tokens that are appended continue from the cache."""
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        engine.append_tokens([ids])
        for name, stage in (("hidden_states", "final_norm"), ("logits", "logits")):
            dump.add(stage, engine.get_output(name)[0])


if __name__ == "__main__":
    answer("onnxruntime-genai", load, compute)
