"""Temporary models of a real shape with random weights."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

QWEN_05B: dict[str, object] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@contextmanager
def random_model(config: dict[str, object]) -> Iterator[Path]:
    """A temporary folder with the model in both formats, weights random, as if just copied from elsewhere."""
    import numpy as np
    from safetensors.numpy import save_file

    from llorch.config import ModelConfig
    from llorch.files import open_weights
    from llorch.files.export import write_gguf
    from llorch.files.names import inventory

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as name:
        folder = Path(name)
        click.echo("writing random weights", err=True)
        (folder / "config.json").write_text(json.dumps(config))
        weights = inventory(ModelConfig.from_huggingface(config, path=folder)).values()
        arrays = {w.huggingface: 0.02 * rng.standard_normal(w.shape, dtype=np.float32) for w in weights}
        arrays |= {name: 1 + array for name, array in arrays.items() if name.endswith("norm.weight")}
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        del arrays
        write_gguf(open_weights(folder), folder / "model.gguf")
        for file in folder.iterdir():
            forget(file)
        yield folder


def forget(path: Path) -> None:
    """Let the system read a file anew: what was just written lies in small pages, which all engines read slower."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
