"""The process that renders chat templates: `main` answers the requests of template_process.py.

A template is a program that came with a file. It runs in jinja's sandbox, which keeps it from everything but its data,
and in a process of its own, which keeps what it costs within limits. The process imports jinja2, the worker and the
standard library only and so starts in about 70 ms.

A frame is JSON. The first one names the limits and is answered when all is ready; each further one is a request. A
template that takes too much processor time ends the process, by an alarm that nothing in it can hold up, and so does
one that takes too much memory.

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
_MAX_REASON = 500  # characters; a template may refuse a conversation with a text of its own


class _TooLong(Exception):
    """A template that writes too much."""


def main() -> None:
    """Answer requests until stdin ends, as it does when the process that asks is gone."""
    channel = Channel(open(0, "rb", 0, closefd=False), open(1, "wb", 0, closefd=False))
    with suppress(EOFError):
        limits = json.loads(channel.receive())
        _prepare(limits["memory"])
        channel.send(_encoded({}))
        try:
            while True:
                request = json.loads(channel.receive().decode("utf-8", "surrogatepass"))
                _set_alarm(limits["seconds"])
                data = _encoded(answer(request, max_text=limits["text"]))
                _set_alarm(0)
                channel.send(data)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)


def answer(request: Mapping[str, object], *, max_text: int) -> dict[str, str]:
    """Render a `source` with `variables` at a `time`, or only compile it: `text`, or `code` and `message`."""
    try:
        template = _compiled(str(request["source"]))
    except MemoryError:
        raise
    except Exception as error:  # of jinja2 or of Python's compiler, whatever it is
        return {"code": "TemplateError", "message": f"cannot be read: {_short_reason(error)}"}
    variables = request.get("variables")
    if not isinstance(variables, dict):
        return {"text": ""}
    try:
        # With it templates write the date; the process has no clock of its own.
        clock = {"strftime_now": datetime.fromisoformat(str(request["time"])).strftime} if "time" in request else {}
        return {"text": _rendered(template, variables | clock, max_text)}
    except MemoryError:
        raise
    except _TooLong:
        return {"code": "TemplateBudget", "message": f"writes over {max_text} characters"}
    except Exception as error:  # whatever the template does with what it sees
        return {"code": "TemplateError", "message": f"refuses this: {_short_reason(error)}"}


def _short_reason(error: Exception) -> str:
    return str(error).rstrip(".")[:_MAX_REASON] or type(error).__name__


def _rendered(template: Template, variables: Mapping[str, object], max_text: int) -> str:
    parts: list[str] = []
    n_characters = 0
    for part in template.generate(**variables):
        parts.append(part)
        n_characters += len(part)
        if n_characters > max_text:
            raise _TooLong
    return "".join(parts)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols],
        optimized=False, finalize=_as_it_is,  # no constant is computed before rendering, or its cost would come twice
    )  # fmt: skip
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant says for other readers; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _as_it_is(context: Context, value: object) -> object:
    """Return the value unchanged. A function that needs the context does not run when a template is compiled."""
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
    """Ignore Ctrl-C, let the time limit end the process, and limit its memory in bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever the one that asks does with it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    limit_memory(memory, kind="RLIMIT_AS")


def _set_alarm(seconds: float) -> None:
    """End the process after so many seconds of processor time, where the system counts it; 0 takes that back."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _encoded(content: Mapping[str, str]) -> bytes:
    """Encode a message as JSON bytes; lone surrogates are kept."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
