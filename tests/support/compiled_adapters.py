"""Run by test_lora_torch_serving_graph.py without the checks of shapes: adapters in eager and compiled steps."""

import sys

from random_adapters import random_adapter
from torch._dynamo.utils import counters

import llorch

PROMPTS = ["Once upon a time", "The"]


def answers(model: llorch.TorchModel) -> list[list[int]]:
    """Of two adapters, of the base, and of the first adapter for a batch."""
    for seed, name in enumerate(("one", "two")):
        model.add_adapter(name, random_adapter(model.config, seed=seed, lora_alpha=3.0, use_dora=seed == 1))
    alone = [
        [token.id for token in model.generate(PROMPTS[0], max_tokens=8, ignore_eos=True, adapter=name)]
        for name in ("one", None, "two")
    ]
    batch = model.generate_batch(PROMPTS, max_tokens=[8, 4], ignore_eos=True, adapter="one")
    return [*alone, [token.id for _, token in batch]]


def main(name: str) -> None:
    """Print ok, or what is wrong."""
    eager, compiled = (answers(llorch.load_torch(name, compiled=compiled)) for compiled in (False, True))
    assert counters["stats"]["unique_graphs"] >= 3, "not every adapter was compiled"
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert eager == compiled, (eager, compiled)
    assert len({tuple(row) for row in eager}) == 4, "the adapters change nothing"
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
