"""Text to token ids and back, and conversations to text.

In comes the metadata of a GGUF file, whose ids are those of llama.cpp, or a Hugging Face folder, whose ids are those of
the `tokenizers` library. Out come a `Tokenizer`, which behaves alike for both, and `Chats`, which write a conversation
as the model reads it and keep the words of users plain text. Nothing of a file is believed. In the order to read:

    tokenizer        what a user calls
    gguf_vocabulary  the metadata, checked: `gguf_table` its lists, `merges` those of BPE, `special` what is no text
    byte_level       words by regular expression, then merges, in the library; `sentencepiece` merges by score, here
    huggingface      tokenizer.json, checked; `pipeline` has the parts that are known, which the library then builds
    messages         what a conversation may be, and what a template leaves out of it
    conversation     control tokens in the words of users are made inert; `chat` has templates, which a process renders:
                     `template_process` asks, `template_worker` answers
    export_gguf      a folder's tokenizer as metadata of a GGUF file; `export_huggingface` the way back
"""

from llorch.files.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
