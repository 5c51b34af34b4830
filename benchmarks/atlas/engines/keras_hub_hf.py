"""KerasHub on torch: its own converter reads the folder; a second graph of the backbone has inner tensors as outputs.

Logits are those of its causal models: the last norm's output times the embedding, or times the output matrix.
"""
# pyright: basic, reportMissingImports=false

import os

os.environ["KERAS_BACKEND"] = "torch"  # before the import, which reads it

from typing import Any

import keras
import keras_hub
import numpy as np
from harness import HarnessRun, answer


def load(run: HarnessRun) -> Any:
    """Load the backbone, which needs no tokenizer."""
    if len(run.parts) > 1:
        raise NotImplementedError("a backbone of keras-hub has no cache: it cannot continue a prompt")
    return keras_hub.models.Backbone.from_preset(run.model, dtype=run.options.get("dtype", "float32"))


def compute(backbone: Any, run: HarnessRun, dump: Any) -> None:
    """Run the pass of a run and add its stages to the dump."""
    ids, first_position = run.passes[0]
    dump.begin(ids, first_position)
    blocks = [layer.output for layer in backbone.transformer_layers]
    observed = keras.Model(backbone.inputs, [*blocks, backbone.output])
    tokens = np.array([ids])
    *outputs, final_norm = observed({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    for layer, output in enumerate(outputs):
        dump.add("block_out", keras.ops.convert_to_numpy(output)[0], layer=layer)
    dump.add("final_norm", keras.ops.convert_to_numpy(final_norm)[0])
    dump.add("logits", keras.ops.convert_to_numpy(backbone.token_embedding(final_norm, reverse=True))[0])


if __name__ == "__main__":
    answer("keras-hub", load, compute)
