"""Text to token ids and back, with the vocabulary of a GGUF file or of a Hugging Face folder."""

from llorch.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
