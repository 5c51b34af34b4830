"""From a trained transformers model to a Hugging Face folder, by transformers itself."""

from pathlib import Path

import transformers

from small_models.vocabulary import Vocabulary


def write(path: Path, model: transformers.PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Write one model with its tokenizer.

    Args:
        path: The folder to write.
        model: The trained model.
        vocabulary: Its vocabulary.
    """
    begin, end = vocabulary.metadata["tokenizer.ggml.bos_token_id"], vocabulary.end_id
    name = vocabulary.tokenizer.id_to_token
    model.save_pretrained(path)
    (path / "generation_config.json").unlink()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.tokenizer, bos_token=name(begin), eos_token=name(end)
    ).save_pretrained(path)
