"""KerasHub on torch: its own converter reads the folder; the backbone is a graph, whose inner tensors are outputs here.

Logits are those of its causal models: the last norm's output times the embedding, or the other matrix, read backwards.
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
    watched = keras.Model(backbone.inputs, [*blocks, backbone.output])
    tokens = np.array([ids])
    *outs, normed = watched({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    for layer, out in enumerate(outs):
        dump.add("block_out", keras.ops.convert_to_numpy(out)[0], layer=layer)
    dump.add("final_norm", keras.ops.convert_to_numpy(normed)[0])
    dump.add("logits", keras.ops.convert_to_numpy(backbone.token_embedding(normed, reverse=True))[0])


if __name__ == "__main__":
    answer("keras-hub", load, compute)
