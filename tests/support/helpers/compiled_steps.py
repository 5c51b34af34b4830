"""Run as a program, without the checks of shapes, which torch.compile cannot trace: eager against compiled steps."""

import sys

from builders.random_adapters import random_adapter
from torch._dynamo.utils import counters

import llorch

PROMPTS = ["Once upon a time", "The"]
DRAWN = llorch.SamplingSettings(temperature=1.1, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=3)


def answers(model: llorch.TorchModel) -> list[list[int]]:
    """Greedy, drawn, and as a batch."""
    out = [
        [token.id for token in model.generate(PROMPTS[0], max_tokens=12, settings=settings, ignore_eos=True)]
        for settings in (llorch.SamplingSettings(), DRAWN)
    ]
    return [*out, [token.id for _, token in model.generate_batch(PROMPTS, max_tokens=[12, 5], ignore_eos=True)]]


def adapted_answers(model: llorch.TorchModel) -> list[list[int]]:
    """Of two adapters, of the base, and of the first adapter for a batch."""
    for seed, name in enumerate(("one", "two")):
        model.add_adapter(name, random_adapter(model.config, seed=seed, lora_alpha=3.0, use_dora=seed == 1))
    alone = [
        [token.id for token in model.generate(PROMPTS[0], max_tokens=8, ignore_eos=True, adapter=name)]
        for name in ("one", None, "two")
    ]
    batch = model.generate_batch(PROMPTS, max_tokens=[8, 4], ignore_eos=True, adapter="one")
    return [*alone, [token.id for _, token in batch]]


def main(name: str, mode: str) -> None:
    """Print ok, or what is wrong."""
    asked, n_graphs, n_texts = (adapted_answers, 3, 4) if mode == "adapters" else (answers, 1, 2)
    eager, compiled = (asked(llorch.load_torch(name, compiled=compiled)) for compiled in (False, True))
    assert counters["stats"]["unique_graphs"] >= n_graphs, "not everything was compiled"
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert eager == compiled, (eager, compiled)
    assert len({tuple(text) for text in eager}) >= n_texts, "the texts are alike"
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
