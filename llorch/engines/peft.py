"""Logits of an adapter in PEFT."""

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
from llorch.lora.peft_format import is_of_whole


def peft_logits(model: str | Path, adapter: str | Path, ids: Sequence[int]) -> Float32[np.ndarray, "seq vocab"]:
    """Compute the logits of every token by PEFT; RuntimeError if tensors are missing, for which PEFT only warns.

    The names in the adapter decide which base is used: the text model alone, or the whole multimodal model.
    """
    with _base_of(model, adapter) as base, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of tied embeddings and renamed functions; keys that do not fit are an error
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
        except UserWarning as warning:
            raise RuntimeError(f"peft: {warning}") from None
        return adapted(torch.tensor([list(ids)])).logits[0].float().numpy()


@contextmanager
def _base_of(model: str | Path, adapter: str | Path) -> Iterator[Any]:
    """Open the base in float32: the whole multimodal model if the adapter is one for it, else the text model."""
    if is_of_whole(adapter):
        yield transformers.AutoModelForImageTextToText.from_pretrained(
            model, local_files_only=True, use_safetensors=True, dtype=torch.float32, attn_implementation="eager"
        )
        return
    with Transformers(model) as base:
        yield base._model
