"""Text to token ids and back, and conversations to text.

Input: the metadata of a GGUF file, with llama.cpp's ids, or a Hugging Face folder, with the ids of the `tokenizers`
library. Output: a `Tokenizer` with one interface for both, and `Chats`, which render conversations and keep control
tokens out of user text. All files are untrusted and checked. In the order to read:

    tokenizer        the public class
    gguf_vocabulary  checked metadata: `gguf_table` token lists, `merges` BPE merges, `special` control tokens
    byte_level       byte-level BPE in the library, words by regular expression; `sentencepiece` merges by score
    huggingface      checked tokenizer.json; `pipeline` has the known parts, which the library builds
    messages         checks of conversations, and of message keys that a template ignores
    conversation     rendering, with inert control tokens in user text; `chat` has templates, run in a child process:
                     `template_process` is the parent, `template_worker` the child
    export_gguf      a folder's tokenizer as metadata of a GGUF file; `export_huggingface` the opposite direction
"""

from llorch.files.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
