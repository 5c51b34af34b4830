"""Child process that renders chat templates: `main` answers the requests of template_process.py.

A template is an untrusted program. It runs in jinja's sandbox, which gives it access only to its data, and in this
process, which limits its cost. The process imports only jinja2, the worker and the standard library, so it starts in
about 70 ms.

A frame is JSON. The first frame has the limits and is answered when the process is ready; each further frame is a
request. A template over the limit of processor time ends the process, by a signal that it cannot block; so does one
over the memory limit.

Source: transformers utils/chat_template_utils.py, `_cached_compile_jinja_template` (environment, filters, variables).
"""

import faulthandler
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llorch.runtime.channel import Channel
from llorch.runtime.worker import limit_memory

_OUT_OF_MEMORY = 4  # exit status
_MAX_REASON = 500  # characters; a template may raise an error with its own text


class _TooLong(Exception):
    """Error of a template with too much output."""


def main() -> None:
    """Answer requests until stdin ends, which happens when the parent is gone."""
    channel = Channel(open(0, "rb", 0, closefd=False), open(1, "wb", 0, closefd=False))
    with suppress(EOFError):
        limits = json.loads(channel.receive())
        _prepare(limits["memory"])
        channel.send(_encode({}))
        try:
            while True:
                request = json.loads(channel.receive().decode("utf-8", "surrogatepass"))
                _set_alarm(limits["seconds"])
                data = _encode(answer(request, max_text=limits["text"]))
                _set_alarm(0)
                channel.send(data)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)


def answer(request: Mapping[str, object], *, max_text: int) -> dict[str, str]:
    """Render `source` with `variables` at `time`, or only compile it; return `text`, or `code` and `message`."""
    try:
        template = _compile(str(request["source"]))
    except MemoryError:
        raise
    except Exception as error:  # any error of jinja2 or of Python's compiler
        return {"code": "TemplateError", "message": f"cannot be read: {_short_reason(error)}"}
    variables = request.get("variables")
    if not isinstance(variables, dict):
        return {"text": ""}
    try:
        # Templates write the date by it; the time comes from the request, not from this process.
        clock = {"strftime_now": datetime.fromisoformat(str(request["time"])).strftime} if "time" in request else {}
        return {"text": _render(template, variables | clock, max_text)}
    except MemoryError:
        raise
    except _TooLong:
        return {"code": "TemplateBudget", "message": f"writes over {max_text} characters"}
    except Exception as error:  # any error of the template
        return {"code": "TemplateError", "message": f"refuses this: {_short_reason(error)}"}


def _short_reason(error: Exception) -> str:
    return str(error).rstrip(".")[:_MAX_REASON] or type(error).__name__


def _render(template: Template, variables: Mapping[str, object], max_text: int) -> str:
    parts: list[str] = []
    n_characters = 0
    for part in template.generate(**variables):
        parts.append(part)
        n_characters += len(part)
        if n_characters > max_text:
            raise _TooLong
    return "".join(parts)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols],
        optimized=False, finalize=_identity,  # no constant folding, which would compute constants twice
    )  # fmt: skip
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


class _Generation(Extension):
    """Jinja tag `{% generation %}`, which marks the assistant's text; the body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _identity(context: Context, value: object) -> object:
    """Return the value unchanged. Because it needs the context, it does not run at compile time."""
    return value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format a value as JSON; characters are not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _prepare(memory: int) -> None:
    """Ignore Ctrl-C, enable the time limit, and limit the memory in bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default: ends the process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    limit_memory(memory, kind="RLIMIT_AS")


def _set_alarm(seconds: float) -> None:
    """Set the limit of processor time, of wall-clock time without such a timer; 0 removes it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _encode(content: Mapping[str, str]) -> bytes:
    """Encode a message as JSON bytes, with lone surrogates."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
