"""What every dump ends in."""

import numpy as np

from llorch.engines.dumps.stage_dump import StageDump
from llorch.stages.stage_ref import Tokens


def test_arrays_of_several_passes_are_told_apart():
    first, second = np.zeros((2, 3), np.float32), np.ones((1, 3), np.float16)
    dump = StageDump.of_arrays([Tokens((4, 5)), Tokens((6,), 2)], {"embed": first}, {"embed": second}, engine="mine")
    assert [(n, key, dumped.stored) for (n, key), dumped in dump.dumped.items()] == [
        (0, "embed", "float32"), (1, "embed", "float16"),
    ]  # fmt: skip
    ((key, dumped),) = dump.of_pass(1)
    assert key == "embed"
    assert dumped.read() is second
    assert dump.features.engine == "mine"
