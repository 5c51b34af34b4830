"""What other programs make of an adapter that PEFT computes rightly.

Source: vllm/lora/peft_helper.py; sglang issue 40835, vllm issues 9280 and 55193, llama.cpp issues 9065 and 11554, peft
issue 2018; runs against llama.cpp in tests/lora/test_gguf_format.py.
"""

import math
from collections.abc import Callable

from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.lora.finding import OK, WARNING, Finding

_SAFE = "llorch lora export BASE ADAPTER NEW --vllm-safe"
_MERGE = "llorch lora merge"


def rslora_scale(adapter: Adapter, weights: Weights) -> Finding:
    """Rank-stabilised scales are ignored by some servers."""
    if not adapter.config.use_rslora:
        return Finding("rsLoRA scale", OK, "alpha / r, which every program knows")
    times = math.sqrt(max(adapter.config.rank_of(target) for target in adapter.targets.values()))
    text = f"SGLang and TensorRT-LLM ignore use_rslora, and llama.cpp's converter too: the adapter is {times:.3g} times"
    return Finding("rsLoRA scale", WARNING, f"{text} too weak there, without an error; for them: {_SAFE}, or a .gguf")


def patterns(adapter: Adapter, weights: Weights) -> Finding:
    """Ranks and alphas of single matrices are read by PEFT only."""
    config = adapter.config
    names = [name for name in ("alpha_pattern", "rank_pattern") if getattr(config, name)]
    if not names:
        return Finding("patterns", OK, "one rank and one alpha")
    text = (
        f"vLLM never reads {' and '.join(names)}: it computes with alpha / r = {config.lora_alpha / config.r:g} for all"
    )
    return Finding("patterns", WARNING, f"{text}; for it: {_SAFE}")


def dora(adapter: Adapter, weights: Weights) -> Finding:
    """Magnitude vectors exist in PEFT only."""
    if not adapter.config.use_dora:
        return Finding("DoRA", OK, "no magnitude vectors")
    return Finding("DoRA", WARNING, f"vLLM and llama.cpp refuse DoRA; for them merge it: {_MERGE}")


def embedding_and_output(adapter: Adapter, weights: Weights) -> Finding:
    """Adapters of the embedding or the output of a tied model act on one side only."""
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if not outer:
        return Finding("embedding and output", OK, "neither is adapted")
    names = " and ".join(outer)
    if not weights.config.tie_word_embeddings:
        return Finding("embedding and output", WARNING, f"{names}: newer vLLM takes no adapter of them; merge for it")
    text = f"{names} of a tied base: llama.cpp refuses or dies, PEFT's merge changes both sides"
    return Finding("embedding and output", WARNING, f"{text}; {_MERGE} writes two matrices")


READER_CHECKS: tuple[Callable[[Adapter, Weights], Finding], ...] = (rslora_scale, patterns, dora, embedding_and_output)
