"""A vocabulary in llama.cpp itself: nothing of a model is loaded but its tokens."""

import ctypes
from pathlib import Path

from helpers.ggml_library import SILENT


class LlamaVocabulary:
    """Token ids and texts as llama.cpp has them."""

    def __init__(self, path: Path) -> None:
        """Open a GGUF file for its vocabulary."""
        import llama_cpp

        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        self.api = llama_cpp
        settings = self.api.llama_model_default_params()
        settings.vocab_only = True
        self.model = self.api.llama_model_load_from_file(str(path).encode(), settings)
        assert self.model is not None, path
        vocab = self.api.llama_model_get_vocab(self.model)
        assert vocab is not None, path
        self.vocab = vocab
        self.size = self.api.llama_vocab_n_tokens(self.vocab)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Encode a text."""
        data = text.encode()
        ids = (self.api.llama_token * (len(data) + 8))()
        count = self.api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        assert count >= 0, text
        return list(ids[:count])

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        buffer = ctypes.create_string_buffer(1024)
        count = self.api.llama_token_to_piece(self.vocab, token_id, buffer, 1024, 0, False)
        return buffer.raw[:count]

    def end_tokens(self) -> set[int]:
        """Return the ids that end a generation."""
        return {i for i in range(self.size) if self.api.llama_vocab_is_eog(self.vocab, i)}

    def close(self) -> None:
        """Free the vocabulary."""
        assert self.model is not None
        self.api.llama_model_free(self.model)
