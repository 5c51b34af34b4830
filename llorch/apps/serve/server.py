"""Listening on a socket until a signal, and leaving without a loss.

The first SIGTERM or SIGINT lets running answers finish, for `grace_seconds`, while new requests get 503; the second
ends the process at once. A server whose engine will not compute any more ends with an error.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import cast

from uvicorn import Config
from uvicorn.server import ServerState

from llorch.apps.serve.connection import ClientLimits, Connection, open_connections
from llorch.apps.serve.engine import Engine
from llorch.apps.serve.refusal import STOPPING, App, Receive, Scope, Send, identified
from llorch.runtime.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVING_SECONDS = 2.0  # for what remains after the grace, told that its client has gone
OTHER_FILES = 128  # that the process has open beside connections


def bind(host: str, port: int) -> socket.socket:
    """Take an address, port 0 for any that is free; ValueError where it cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(f"serve: expected an address of this machine, got {host}:{port} ({error})") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        why = f"{error.strerror}; choose another --port, or 0 for any free port"
        raise UserError(f"serve: cannot listen on {host}:{port}: {why}") from None
    return bound


class RunningServer:
    """A server at work, as the rest of the process sees it."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, connections: Collection[Connection]) -> None:
        """Describe a server that was started and not yet asked to stop."""
        self.url = url
        self.connections = connections  # that are open now
        self.stopping = asyncio.Event()
        self.signal: int | None = None  # that stopped it
        self.error: BaseException | None = None  # that it has to end with
        self._loop = loop

    def stop(self, error: BaseException | None = None) -> None:
        """Let it end as SIGTERM does, from any thread; an error is what `serve` then raises."""
        self.error = self.error or error
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self.stopping.set)

    def on_signal(self, number: int) -> None:
        """Stop, or leave at once when it comes again."""
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        self.stop()


def serve(
    app: App,
    bound: socket.socket,
    *,
    ready: Callable[[RunningServer], None],
    on_stop: Callable[[], None] = lambda: None,
    limits: ClientLimits | None = None,
) -> None:
    """Serve an ASGI application on what `bind` gave, until a signal or `RunningServer.stop`.

    Args:
        app: The application; it gets no lifespan events.
        bound: The socket; closed at the end.
        ready: Called once, as soon as connections are accepted.
        on_stop: Called once, when no new work is to begin.
        limits: What a client may take.

    Raises:
        KeyboardInterrupt: SIGINT ended it.
        BaseException: What `RunningServer.stop` was given.
    """
    ended = asyncio.run(_serve(app, bound, ready, on_stop, _within_open_files(limits or ClientLimits())))
    if ended.error is not None:
        raise ended.error
    if ended.signal == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    app: App,
    bound: socket.socket,
    ready: Callable[[RunningServer], None],
    on_stop: Callable[[], None],
    limits: ClientLimits,
) -> RunningServer:
    loop, state = asyncio.get_running_loop(), ServerState()
    running = RunningServer(_url(bound), loop, cast(Collection[Connection], state.connections))
    config = Config(
        identified(_refusing_when_stopped(app, running.stopping)), http="h11", ws="none", lifespan="off",
        proxy_headers=False, log_config=None, log_level="error", access_log=False,
        timeout_keep_alive=int(limits.idle_seconds) + 1,
    )  # fmt: skip
    config.load()
    with _signals_to(running):
        server = await loop.create_server(lambda: Connection(config, state, limits), sock=bound, backlog=1024)
        ready(running)
        await running.stopping.wait()
        on_stop()
        await _let_finish(state, limits.grace_seconds)
        server.close()
        await _close_all(state)
    return running


def _refusing_when_stopped(app: App, stopping: asyncio.Event) -> App:
    """Wrap an application so that it refuses every new request, also for its health, once the server stops."""

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        if not stopping.is_set():
            return await app(scope, receive, send)
        await STOPPING.say(send, receive)

    return either


async def _let_finish(state: ServerState, seconds: float) -> None:
    """Wait for the requests of now; those that come meanwhile are refused."""
    for connection in open_connections(state):
        connection.shutdown()
    if state.tasks:
        await asyncio.wait(list(state.tasks), timeout=seconds)


async def _close_all(state: ServerState) -> None:
    """Close what is open; an application that still answers finds its client gone."""
    for connection in open_connections(state):
        connection.shutdown()
        if connection.awaited == "nothing" and not connection.transport.is_closing():
            connection.transport.abort()
    loop = asyncio.get_running_loop()
    end = loop.time() + LEAVING_SECONDS
    while (state.connections or state.tasks) and loop.time() < end:  # last bytes, last words
        await asyncio.sleep(0.01)
    for connection in open_connections(state):
        connection.transport.abort()


@contextmanager
def _signals_to(running: RunningServer) -> Iterator[None]:
    """Listen to signals; outside the main thread nobody can."""
    loop = asyncio.get_running_loop()
    heard = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for number in heard:
        loop.add_signal_handler(number, running.on_signal, number)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def _url(bound: socket.socket) -> str:
    """Return the address of the server for a browser."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _within_open_files(limits: ClientLimits) -> ClientLimits:
    """Limit connections to the files that the system lets the process open, after asking it to raise the limit."""
    try:
        import resource
    except ImportError:  # not Unix
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return replace(limits, connections=max(1, min(limits.connections, wanted - OTHER_FILES)))


LOOK = 0.5  # seconds between two looks


def watch_engine(engine: Engine, running: RunningServer) -> None:
    """Stop a server when its engine has died, or is stuck; in a thread, which ends with the process."""
    threading.Thread(target=_watch, args=(engine, running), name="llorch-watch", daemon=True).start()


def _watch(engine: Engine, running: RunningServer) -> None:
    """Stop the server with an error once the engine has failed or a step does not return."""
    never = threading.Event()
    while not never.wait(LOOK):
        if engine.is_stuck:
            engine.give_up(TimeoutError("a step of the engine does not return"))
        if engine.failure is not None and not engine.draining:
            return running.stop(RuntimeError(f"serve: the engine has died: {engine.failure!r}"))
