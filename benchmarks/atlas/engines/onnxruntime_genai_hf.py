"""ONNX Runtime GenAI: its model builder converts the folder to a graph, its generator runs it.

It returns the logits and, by an option of the builder, the input of the last matrix.
"""
# pyright: basic, reportMissingImports=false

from typing import Any

import onnxruntime_genai as og
from harness import HarnessRun, answer
from onnxruntime_genai.models.builder import create_model, parse_extra_options


def load(run: HarnessRun) -> og.Generator:
    """Build the graph, and open it."""
    folder, dtype = f"{run.scratch}/onnxruntime_genai", {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    args = (run.model, run.model, folder, dtype[run.options.get("dtype", "float32")], "cpu", f"{run.scratch}/cache")
    create_model(*args, **parse_extra_options(*args, ["include_hidden_states=true"]))
    model = og.Model(folder)
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=sum(map(len, run.parts)) + 1)
    return og.Generator(model, params)


def compute(engine: og.Generator, run: HarnessRun, dump: Any) -> None:
    """Run all passes: appended tokens continue from the cache."""
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        engine.append_tokens([ids])
        for name, stage in (("hidden_states", "final_norm"), ("logits", "logits")):
            dump.add(stage, engine.get_output(name)[0])


if __name__ == "__main__":
    answer("onnxruntime-genai", load, compute)
