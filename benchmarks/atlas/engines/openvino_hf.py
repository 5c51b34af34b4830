"""OpenVINO: optimum-intel traces the model of transformers into a graph, OpenVINO's CPU plugin runs it.

The graph is asked for float32, where the plugin would take what the processor is fastest at.
"""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402

import sys
from typing import Any

sys.modules["torchvision"] = None  # pyright: ignore  # optional; of another build of torch than the one here it fails

import torch
from harness import HarnessRun, answer
from optimum.intel import OVModelForCausalLM

PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def load(run: HarnessRun) -> Any:
    """Export the folder, and compile what comes of it."""
    precision = PRECISION[run.options.get("dtype", "float32")]
    asked = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "CACHE_DIR": ""}
    return OVModelForCausalLM.from_pretrained(run.model, export=True, load_in_8bit=False, device="CPU", ov_config=asked)


def compute(engine: Any, run: HarnessRun, dump: Any) -> None:
    """All passes, on the state that the graph keeps."""
    past = None
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        mask = torch.ones((1, first_position + len(ids)), dtype=torch.int64)
        said = engine(torch.tensor([ids]), attention_mask=mask, past_key_values=past, use_cache=True)
        past = said.past_key_values
        dump.add("logits", said.logits[0].float().numpy())


if __name__ == "__main__":
    answer("openvino", load, compute)
