"""RoPE scaling against llama.cpp: our reader makes of the GGUF keys what llama.cpp computes from them."""

from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, VOCAB, gguf_tensors, write_file

from llorch.engines import open_engine
from llorch.model.model import load
from llorch.stages.comparison import Tolerance, compare

pytestmark = pytest.mark.live

IDS = [1, 5, 3, 9, 2, 7, 4, 8, 6, 10]
NO_VOCABULARY: dict[str, object] = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCAB}
YARN: dict[str, object] = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
SCALINGS: dict[str, tuple[dict[str, object], bool]] = {  # keys below rope.scaling, and whether they change anything
    "none": ({}, False),
    "none-with-factor": ({"type": "none", "factor": 4.0}, False),
    "linear-of-nothing": ({"type": "linear", "factor": 0.0}, False),
    "linear": ({"type": "linear", "factor": 3.0}, True),
    "linear-without-type": ({"factor": 3.0}, True),
    "yarn": (YARN, True),
    "yarn-of-the-context": ({"type": "yarn", "factor": 4.0}, True),
    "yarn-with-attention-factor": (YARN | {"attn_factor": 0.75}, True),
    "yarn-with-keys-of-no-effect": (YARN | {"yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0}, True),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_positions_agree_with_both_engines(tmp_path: Path, name: str):
    keys, changes = SCALINGS[name]
    metadata = GGUF_METADATA | NO_VOCABULARY | {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    path = write_file(tmp_path / "x.gguf", gguf_tensors(), metadata)
    ours: dict[str, np.ndarray] = {}
    model = load(path)
    model.forward(IDS, trace=ours, first_position=3)
    assert (model.config.rope_scaling is not None) == changes
    for engine_name in ("llamacpp", "transformers"):
        with open_engine(engine_name, path) as engine:
            theirs = engine.trace(IDS, first_position=3)
        report = compare(ours, theirs, Tolerance(5e-6, 5e-5))  # float32 engines lie within 2e-6 of one another
        assert report.first_divergence is None, f"{engine_name}: {report}"
