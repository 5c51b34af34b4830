"""The producer `transformers`: what it says of models that transformers does not take."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import random_tensors, write_folder

from llorch.producers import open_producer
from llorch.weights import open_weights
from llorch.weights.export import write_gguf

pytestmark = pytest.mark.live


def test_a_configuration_that_transformers_refuses_is_said_in_one_line(tmp_path: Path):
    tensors = random_tensors("llama")  # three of the four heads of 8, on a hidden size of 32
    parts = {"q_proj": np.s_[:24], "o_proj": np.s_[:, :24], "k_proj": np.s_[:8], "v_proj": np.s_[:8]}
    tensors |= {n: t[cut].copy() for n, t in tensors.items() for part, cut in parts.items() if part in n}
    folder = write_folder(tmp_path / "m", tensors, num_attention_heads=3, num_key_value_heads=1, head_dim=8)
    write_gguf(open_weights(folder), tmp_path / "m.gguf")
    for path in (folder, tmp_path / "m.gguf"):
        with pytest.raises(RuntimeError, match=r"refuses the configuration: The hidden size \(32\) is not a multiple"):
            open_producer("transformers", path)
