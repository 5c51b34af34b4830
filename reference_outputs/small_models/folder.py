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
    begin, name = vocabulary.metadata["tokenizer.ggml.bos_token_id"], vocabulary.tokenizer.id_to_token
    assert isinstance(begin, int)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.tokenizer, bos_token=name(begin), eos_token=name(vocabulary.end_id)
    ).save_pretrained(path)
