"""CTranslate2: its converter reads the folder, its generator returns logits of every position.

It has no hooks for stages, and no cache that a second call could continue from.
"""
# pyright: basic, reportMissingImports=false

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter
from harness import HarnessRun, answer


class Converter(TransformersConverter):
    """CTranslate2's converter; ids need no vocabulary, so a folder without a tokenizer gets a vocabulary of numbers."""

    def load_tokenizer(self, tokenizer_class: Any, model_name_or_path: str, **options: Any) -> Any:
        """Load the folder's tokenizer if it has one."""
        if any(Path(model_name_or_path, name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            return super().load_tokenizer(tokenizer_class, model_name_or_path, **options)
        return SimpleNamespace(bos_token="0", eos_token="1", unk_token="2", pad_token="0", get_vocab=lambda: {"0": 0})


def load(run: HarnessRun) -> ctranslate2.Generator:
    """Convert the folder, and open the result."""
    if len(run.parts) > 1:
        raise NotImplementedError("forward_batch of ctranslate2 has no cache: it cannot continue a prompt")
    dtype = run.options.get("dtype", "float32")
    Converter(run.model).convert(f"{run.scratch}/ctranslate2", quantization=dtype, force=True)
    threads = int(run.options.get("threads", 1))
    return ctranslate2.Generator(f"{run.scratch}/ctranslate2", compute_type=dtype, intra_threads=threads)


def compute(engine: ctranslate2.Generator, run: HarnessRun, dump: Any) -> None:
    """Run the pass of a run and add its logits to the dump."""
    ids, first_position = run.passes[0]
    dump.begin(ids, first_position)
    logits = engine.forward_batch([ids]).to(ctranslate2.DataType.float32)
    dump.add("logits", np.array(logits)[0])


if __name__ == "__main__":
    answer("ctranslate2", load, compute)
