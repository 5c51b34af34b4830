"""Texts that a converted tokenizer must encode as its source does, before the conversion counts as done."""

from collections.abc import Iterable
from pathlib import Path

from llorch.errors import FormatError
from llorch.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.tokenizer.huggingface import HuggingFaceVocabulary

Vocabulary = GGUFVocabulary | HuggingFaceVocabulary

PROBES = (
    "",
    " ",
    "Hello, world! It's 2024, isn't it? I'LL BE",
    "  two  spaces\n\n\ttabs\r\nand lines  ",
    "def f(x):\n    return x ** 2 + 12345.678\n",
    "\u00fcber na\u00efve \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u041f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469 \u2028 \ufffd",
    "a" * 9 + " " * 7 + "1" * 11 + "!" * 5,
)


def require_same_ids(source: Vocabulary, target: Vocabulary, texts: Iterable[str] = PROBES, *, path: Path) -> None:
    """Refuse (Unsupported) to convert a vocabulary to one that encodes a text differently, naming the first."""
    for text in texts:
        want = source.encode(text, add_special=True, parse_special=False)
        got = target.encode(text, add_special=True, parse_special=False)
        if got != want:
            message = f"tokenizer: the target would encode {text!r} as {got[:20]}, the source has {want[:20]}"
            raise FormatError("Unsupported", message, path=path)
