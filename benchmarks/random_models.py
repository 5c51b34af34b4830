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

HYBRID_05B: dict[str, object] = {  # Qwen3.5-0.8B, with a smaller vocabulary
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip

EXPERTS_05B: dict[str, object] = {  # 0.44 billion weights active per token, 2 billion in total
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}

SHAPES = {"dense": QWEN_05B, "hybrid": HYBRID_05B, "experts": EXPERTS_05B}


@contextmanager
def random_model(config: dict[str, object]) -> Iterator[Path]:
    """Make a temporary folder with the model in both formats and random weights, as if just copied from elsewhere."""
    import numpy as np
    from safetensors.numpy import save_file

    from llorch.families.read_huggingface import config_from_huggingface
    from llorch.files import open_weights
    from llorch.files.export import write_gguf
    from llorch.files.tensor_names import huggingface_tensors

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="llorch-benchmark-") as name:
        folder = Path(name)
        click.echo("writing random weights", err=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = huggingface_tensors(config_from_huggingface(config, path=folder))
        arrays = {tensor.name: 0.02 * rng.standard_normal(tensor.shape, dtype=np.float32) for tensor in tensors}
        arrays |= {name: 1 + array for name, array in arrays.items() if name.endswith("norm.weight")}
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        del arrays
        write_gguf(open_weights(folder), folder / "model.gguf")
        for file in folder.iterdir():
            forget(file)
        yield folder


def forget(path: Path) -> None:
    """Drop a file from the page cache: just-written pages are small, and all engines read them slower."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
