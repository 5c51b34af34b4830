"""Write a trained transformers model as a Hugging Face folder, with transformers itself."""

from pathlib import Path

import numpy as np
import transformers
from safetensors.numpy import load_file, save_file

from small_models.vocabulary import Vocabulary


def write(path: Path, model: transformers.PreTrainedModel, vocabulary: Vocabulary, *, transposed: bool) -> None:
    """Write one model with its tokenizer.

    Args:
        path: The folder to write.
        model: The trained model.
        vocabulary: Its vocabulary.
        transposed: Store experts as (experts, in, out), as in published folders, which transformers 4 wrote.
    """
    begin, name = vocabulary.metadata["tokenizer.ggml.bos_token_id"], vocabulary.tokenizer.id_to_token
    assert isinstance(begin, int)
    model.save_pretrained(path)
    if transposed:
        _transpose_experts(path / "model.safetensors")
    (path / "generation_config.json").unlink()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.tokenizer, bos_token=name(begin), eos_token=name(vocabulary.end_id)
    ).save_pretrained(path)


def _transpose_experts(file: Path) -> None:
    tensors = {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if ".experts." in name else array
        for name, array in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
