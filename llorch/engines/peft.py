"""Logits of a model with an adapter, computed by PEFT."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from jaxtyping import Float32

from llorch.engines.transformers import Transformers
from llorch.lora.peft_format import has_multimodal_names


def peft_logits(model: str | Path, adapter: str | Path, ids: Sequence[int]) -> Float32[np.ndarray, "seq vocab"]:
    """Compute the logits of every token with PEFT; raise RuntimeError if adapter tensors are missing.

    PEFT itself only warns of missing tensors. The tensor names in the adapter select the base: text or multimodal.
    """
    with _open_base(model, adapter) as base, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tied embeddings, renamed functions; missing keys remain an error
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
        except UserWarning as warning:
            raise RuntimeError(f"peft: {warning}") from None
        return adapted(torch.tensor([list(ids)])).logits[0].float().numpy()


@contextmanager
def _open_base(model: str | Path, adapter: str | Path) -> Iterator[Any]:
    """Open the base in float32: the whole multimodal model if the adapter was trained on it, else the text model."""
    if has_multimodal_names(adapter):
        yield transformers.AutoModelForImageTextToText.from_pretrained(
            model, local_files_only=True, use_safetensors=True, dtype=torch.float32, attn_implementation="eager"
        )
        return
    with Transformers(model) as base:
        yield base._model
