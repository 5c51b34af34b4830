"""Run by test_torch_graph.py without the checks of shapes, which torch.compile cannot trace: eager against compiled."""

import sys

from torch._dynamo.utils import counters

import llorch

PROMPTS = ["Once upon a time", "The"]


def answers(model: llorch.TorchModel) -> list[list[int]]:
    """Greedy, drawn, and as a batch."""
    drawn = llorch.SamplingSettings(temperature=1.1, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=3)
    out = [
        [token.id for token in model.generate(PROMPTS[0], max_tokens=12, settings=settings, ignore_eos=True)]
        for settings in (llorch.SamplingSettings(), drawn)
    ]
    return [*out, [token.id for _, token in model.generate_batch(PROMPTS, max_tokens=[12, 5], ignore_eos=True)]]


def main(name: str) -> None:
    """Print ok, or what is wrong."""
    eager, compiled = (answers(llorch.load_torch(name, compiled=compiled)) for compiled in (False, True))
    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert eager == compiled, (eager, compiled)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
