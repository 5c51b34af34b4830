"""OpenVINO: optimum-intel traces the model of transformers into a graph, OpenVINO's CPU plugin runs it.

The graph runs in float32; by default the plugin chooses the fastest type of the processor.
"""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402

import sys
from typing import Any

sys.modules["torchvision"] = None  # pyright: ignore  # optional; fails if built for another torch

import torch
from harness import HarnessRun, answer
from optimum.intel import OVModelForCausalLM

PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def load(run: HarnessRun) -> Any:
    """Export the folder, and compile the graph."""
    precision = PRECISION[run.options.get("dtype", "float32")]
    hints = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "CACHE_DIR": ""}
    return OVModelForCausalLM.from_pretrained(run.model, export=True, load_in_8bit=False, device="CPU", ov_config=hints)


def compute(engine: Any, run: HarnessRun, dump: Any) -> None:
    """Run all passes on the state in the graph."""
    past = None
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        mask = torch.ones((1, first_position + len(ids)), dtype=torch.int64)
        output = engine(torch.tensor([ids]), attention_mask=mask, past_key_values=past, use_cache=True)
        past = output.past_key_values
        dump.add("logits", output.logits[0].float().numpy())


if __name__ == "__main__":
    answer("openvino", load, compute)
