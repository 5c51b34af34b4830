"""`/v1/trace`: what every stage of a pass computes, as figures, and as arrays where they are asked for.

The pass runs on the engine's thread between two steps. Only arrays that are asked for are kept.
"""

import base64
import io
from collections.abc import Collection
from functools import partial

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve.api_errors import ApiError, wrong
from llorch.apps.serve.http import read_body, reply, run_beside_loop, service_of, unless_gone
from llorch.apps.serve.replies import Stage, Trace
from llorch.apps.serve.requests import TraceRequest
from llorch.apps.serve.response_stream import between_steps
from llorch.apps.serve.service import Service
from llorch.apps.serve.unsupported_fields import ignored_fields

MAX_TOKENS = 512  # a stretch of a prompt: others wait no longer for it than for one
MAX_BYTES = 16 << 20  # of arrays


async def answer(request: Request) -> Response:
    """Answer a request of this route."""
    body, service = await read_body(request, TraceRequest), service_of(request)
    ignored = ignored_fields(body)
    adapter, ids, unwritten = await run_beside_loop(
        service, lambda: _read_ids(service, body), renders=body.messages is not None
    )
    ignored += unwritten
    figures = _Figures(body.arrays or ())
    return await unless_gone(request, _traced(service, body, ids, adapter, figures, ignored))


async def _traced(
    service: Service, body: TraceRequest, ids: list[int], adapter: str | None, figures: "_Figures", ignored: list[str]
) -> Response:
    run = partial(service.model.forward, ids, trace=figures, adapter=adapter)
    await between_steps(service.engine, run, service.timeout)
    unknown = [name for name in body.arrays or () if name not in figures.stages]
    if unknown:
        raise wrong(f"arrays.{(body.arrays or []).index(unknown[0])}", "the name of a stage", unknown[0])
    stages, arrays = list(figures.stages.values()), await run_beside_loop(service, figures.encoded)
    return reply(Trace(model=body.model, tokens=ids, stages=stages, arrays=arrays), ignored)


def _read_ids(service: Service, body: TraceRequest) -> tuple[str | None, list[int], list[str]]:
    """Read the input; also returned are the adapter, and the keys of messages that the model does not read."""
    adapter, messages = service.adapter(body.model), [message.plain() for message in body.messages or ()]
    if body.tokens is not None:
        param, ids = "tokens", body.tokens
    elif body.prompt is not None:
        param, ids = "prompt", service.text_ids(body.prompt, parse_special=body.parse_special)
    else:
        param, ids = "messages", service.chat_ids(messages)
    most = min(MAX_TOKENS, service.context)
    if len(ids) > most:
        raise ApiError(400, f"{param}: expected at most {most} tokens for a trace, got {len(ids)}", param=param,
                       code="context_length_exceeded")  # fmt: skip
    try:
        service.model.checked_ids(ids)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
    return adapter, ids, service.unwritten_keys(messages)


class _Figures(dict[str, np.ndarray]):
    """A trace that keeps figures of all stages, and arrays of few."""

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__()
        self.stages: dict[str, Stage] = {}
        self._wanted, self._room = frozenset(wanted), MAX_BYTES

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self.stages[name] = _stage_summary(name, array)
        if name in self._wanted:
            self._room -= array.nbytes
            if self._room < 0:
                text = f"arrays: expected at most {MAX_BYTES} bytes, got more; ask for fewer arrays or tokens"
                raise ApiError(400, text, param="arrays")
            super().__setitem__(name, array.copy())

    def encoded(self) -> dict[str, str]:
        """Encode the arrays as text."""
        return {name: base64.b64encode(_npy(array)).decode() for name, array in self.items()}


def _stage_summary(name: str, array: np.ndarray) -> Stage:
    """Summarise an array of a stage: shape, range, mean and RMS of its finite values."""
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    some = finite.size > 0
    return Stage(
        name=name,
        shape=list(array.shape),
        n_not_finite=wide.size - finite.size,
        min=float(finite.min()) if some else None,
        max=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
        rms=float(np.sqrt(np.mean(finite * finite))) if some else None,
    )


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
