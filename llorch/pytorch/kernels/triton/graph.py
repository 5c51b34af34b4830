"""Decode steps without host work per token: a step recorded once as a CUDA graph and replayed.

A graph reads a fixed number of slots and masks the unused slots. So there is one graph per size class, recorded when
the first sequence grows into it; all graphs work on the same tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llorch.pytorch.decoding import Decoding, size_class

_WARM_UPS = 2  # steps before recording, in which libraries and kernels initialise


class GraphedSteps:
    """Steps of one decoding as CUDA graphs."""

    def __init__(self) -> None:
        """Start without graphs."""
        self._graphs: dict[int, Any] = {}

    def __call__(self, decoding: Decoding, ctx: int) -> None:
        """Replay a step that reads `ctx` slots or more, always of the same decoding; the host does not wait.

        The decoding has a reference to this object; a reference back would be a cycle, which delays freeing device
        memory.
        """
        size = size_class(ctx, decoding.cache.n_slots)
        if size not in self._graphs:
            with torch.cuda.device(decoding.ids.device):
                pool = next((graph.pool() for graph in self._graphs.values()), None)
                step, warm_up = partial(decoding.step, size), partial(run_warm_up, decoding, size)
                self._graphs[size] = recorded(step, warm_up=warm_up, pool=pool)
        self._graphs[size].replay()


def recorded(call: Callable[[], object], *, warm_up: Callable[[], object], pool: Any = None) -> Any:
    """Warm up on a side stream, as recording requires, then record a call as a CUDA graph and return the graph."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        call()
    return graph


def run_warm_up(decoding: Decoding, ctx: int) -> None:
    """Run a step some times without advancing: only the cache slots that the next step writes change."""
    saved_state = [tensor.clone() for tensor in decoding.state]
    for _ in range(_WARM_UPS):
        decoding.step(ctx)
        for tensor, saved_tensor in zip(decoding.state, saved_state, strict=True):
            tensor.copy_(saved_tensor)
