"""`/v1/trace`: a summary of every stage of a forward pass, and the arrays of requested stages.

The pass runs on the engine's thread between two steps of its batch. Only requested arrays are stored.
"""

import base64
import io
from collections.abc import Collection
from functools import partial

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from llorch.apps.serve.api_errors import ApiError, wrong
from llorch.apps.serve.http import get_service, read_body, reply, run_in_thread, wait_for_answer
from llorch.apps.serve.replies import Stage, Trace
from llorch.apps.serve.requests import TraceRequest
from llorch.apps.serve.response_stream import run_between_steps
from llorch.apps.serve.service import Service
from llorch.apps.serve.unsupported_fields import ignored_fields
from llorch.model.model import PREFILL_CHUNK

MAX_BYTES = 16 << 20  # of all requested arrays of one trace together


async def answer(request: Request) -> Response:
    """Answer a POST to /v1/trace."""
    body, service = await read_body(request, TraceRequest), get_service(request)
    ignored = ignored_fields(body)
    adapter, ids, unrendered_keys = await run_in_thread(
        service, lambda: _prepare_input(service, body), renders_template=body.messages is not None
    )
    ignored += unrendered_keys
    return await wait_for_answer(request, _run_trace(service, body, ids, adapter, ignored))


async def _run_trace(
    service: Service, body: TraceRequest, ids: list[int], adapter: str | None, ignored: list[str]
) -> Response:
    trace = _SummarisingTrace(body.arrays or ())
    run = partial(service.model.forward, ids, trace=trace, adapter=adapter)
    await run_between_steps(service.engine, run, service.timeout)
    unknown = [name for name in body.arrays or () if name not in trace.stages]
    if unknown:
        raise wrong(f"arrays.{(body.arrays or []).index(unknown[0])}", "the name of a stage", unknown[0])
    stages, arrays = list(trace.stages.values()), await run_in_thread(service, trace.encode_arrays)
    return reply(Trace(model=body.model, tokens=ids, stages=stages, arrays=arrays), ignored)


def _prepare_input(service: Service, body: TraceRequest) -> tuple[str | None, list[int], list[str]]:
    """Return the adapter, the token ids, and the keys of messages that the chat template does not render."""
    adapter, messages = service.adapter(body.model), [message.to_template() for message in body.messages or ()]
    if body.tokens is not None:
        param, ids = "tokens", body.tokens
    elif body.prompt is not None:
        param, ids = "prompt", service.text_ids(body.prompt, parse_special=body.parse_special)
    else:
        param, ids = "messages", service.chat_ids(messages)
    max_tokens = min(PREFILL_CHUNK, service.context)  # a trace delays other requests no more than a prefill chunk
    if len(ids) > max_tokens:
        raise ApiError(400, f"{param}: expected at most {max_tokens} tokens for a trace, got {len(ids)}", param=param,
                       code="context_length_exceeded")  # fmt: skip
    try:
        service.model.checked_ids(ids)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
    return adapter, ids, service.unrendered_keys(messages)


class _SummarisingTrace(dict[str, np.ndarray]):
    """Dict for the argument `trace` of `forward`: summarises every stage, stores the arrays of requested stages."""

    def __init__(self, array_names: Collection[str]) -> None:
        super().__init__()
        self.stages: dict[str, Stage] = {}
        self._array_names, self._n_free_bytes = frozenset(array_names), MAX_BYTES

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self.stages[name] = _summarise_stage(name, array)
        if name in self._array_names:
            self._n_free_bytes -= array.nbytes
            if self._n_free_bytes < 0:
                text = f"arrays: expected at most {MAX_BYTES} bytes, got more; ask for fewer arrays or tokens"
                raise ApiError(400, text, param="arrays")
            super().__setitem__(name, array.copy())

    def encode_arrays(self) -> dict[str, str]:
        """Encode the arrays as .npy files in base64."""
        return {name: base64.b64encode(_encode_npy(array)).decode() for name, array in self.items()}


def _summarise_stage(name: str, array: np.ndarray) -> Stage:
    """Summarise the array of a stage: shape, and range, mean and RMS of its finite values."""
    values = array.astype(np.float64)
    finite = values[np.isfinite(values)]
    has_finite = finite.size > 0
    return Stage(
        name=name,
        shape=list(array.shape),
        n_not_finite=values.size - finite.size,
        min=float(finite.min()) if has_finite else None,
        max=float(finite.max()) if has_finite else None,
        mean=float(finite.mean()) if has_finite else None,
        rms=float(np.sqrt(np.mean(finite * finite))) if has_finite else None,
    )


def _encode_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
