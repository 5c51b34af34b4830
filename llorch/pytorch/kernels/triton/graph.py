"""Decoding without host work per token: a step recorded once as a CUDA graph and replayed.

A graph is made for a fixed number of slots to look at, with the unfilled ones masked. So there is one graph per size
class, made when the first sequence grows into it; all of them work on the same tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llorch.pytorch.decoding import Decoding, size_class

_WARM_UPS = 2  # steps before recording: libraries and kernels set themselves up in the first ones


class GraphedSteps:
    """The steps of one decoding as CUDA graphs."""

    def __init__(self) -> None:
        """Record nothing yet."""
        self._graphs: dict[int, Any] = {}

    def __call__(self, decoding: Decoding, ctx: int) -> None:
        """Replay a step that looks at `ctx` slots or more, always of the same decoding; the host does not wait.

        The decoding holds this object, so this one must not hold it: memory of the device is to be free as soon as
        nobody wants it.
        """
        size = size_class(ctx, decoding.cache.n_slots)
        if size not in self._graphs:
            with torch.cuda.device(decoding.ids.device):
                pool = next((made.pool() for made in self._graphs.values()), None)
                step, warm_up = partial(decoding.step, size), partial(try_out, decoding, size)
                self._graphs[size] = recorded(step, warm_up=warm_up, pool=pool)
        self._graphs[size].replay()


def recorded(call: Callable[[], object], *, warm_up: Callable[[], object], pool: Any = None) -> Any:
    """Warm up on a stream of its own, as recording asks for, then record a call."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        warm_up()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        call()
    return graph


def try_out(decoding: Decoding, ctx: int) -> None:
    """Run a step some times without going on: only the cache slots that the next step writes are changed."""
    before = [tensor.clone() for tensor in decoding.state]
    for _ in range(_WARM_UPS):
        decoding.step(ctx)
        for tensor, value in zip(decoding.state, before, strict=True):
            tensor.copy_(value)
