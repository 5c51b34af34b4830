"""PEFT loading an adapter directory by itself: the witness for what a directory means to it."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import peft
import torch
from jaxtyping import Float32

from llorch.verify.witnesses.transformers import Transformers


def peft_logits(model: str | Path, adapter: str | Path, ids: Sequence[int]) -> Float32[np.ndarray, "seq vocab"]:
    """Logits of every token from PEFT, which only warns where it misses tensors in an adapter: refused here."""
    with Transformers(model) as base, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of tied embeddings and renamed functions; keys that do not fit are an error
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = peft.PeftModel.from_pretrained(base._model, adapter).eval()
        except UserWarning as warning:
            raise RuntimeError(f"peft: {warning}") from None
        return adapted(torch.tensor([list(ids)])).logits[0].float().numpy()
