"""Listen on a socket until a signal, and shut down gracefully.

After the first SIGTERM or SIGINT, running answers may finish within `grace_seconds`, and new requests get 503. The
second signal ends the process at once. A server ends with an error if its engine has died or hangs.
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
from llorch.apps.serve.refusal import STOPPING, App, Receive, Scope, Send, add_request_id
from llorch.runtime.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSING_SECONDS = 2.0  # after the grace period, for cut-off answers to end
RESERVED_FILES = 128  # open files of the process other than connections


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address, port 0 for any free port; raise UserError if the address is unavailable."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(f"serve: expected an address of this machine, got {host}:{port} ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"{error.strerror}; choose another --port, or 0 for any free port"
        raise UserError(f"serve: cannot listen on {host}:{port}: {reason}") from None
    return listener


class RunningServer:
    """Handle of a running server for other parts of the process."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, connections: Collection[Connection]) -> None:
        """Describe a server that has started and is not stopping."""
        self.url = url
        self.connections = connections  # the open connections
        self.stopping = asyncio.Event()
        self.signal: int | None = None  # the signal that stopped it
        self.error: BaseException | None = None  # the error that `serve` raises at the end
        self._loop = loop

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the server as SIGTERM does, from any thread; `serve` then raises `error`, if it is given."""
        self.error = self.error or error
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.stopping.set)

    def on_signal(self, number: int) -> None:
        """Stop the server; at the second signal, end the process at once."""
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        self.stop()


def serve(
    app: App,
    listener: socket.socket,
    *,
    ready: Callable[[RunningServer], None],
    on_stop: Callable[[], None] = lambda: None,
    limits: ClientLimits | None = None,
) -> None:
    """Serve an ASGI application on a socket of `bind`, until a signal or `RunningServer.stop`.

    Args:
        app: The application; it gets no lifespan events.
        listener: The listening socket; closed at the end.
        ready: Called once, as soon as connections are accepted.
        on_stop: Called once, when the server accepts no new requests any more.
        limits: Limits of each client.

    Raises:
        KeyboardInterrupt: SIGINT ended the server.
        BaseException: The error given to `RunningServer.stop`.
    """
    server = asyncio.run(_serve(app, listener, ready, on_stop, _limit_to_open_files(limits or ClientLimits())))
    if server.error is not None:
        raise server.error
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    app: App,
    listener: socket.socket,
    ready: Callable[[RunningServer], None],
    on_stop: Callable[[], None],
    limits: ClientLimits,
) -> RunningServer:
    loop, state = asyncio.get_running_loop(), ServerState()
    running = RunningServer(_url(listener), loop, cast(Collection[Connection], state.connections))
    config = Config(
        add_request_id(_refuse_when_stopping(app, running.stopping)), http="h11", ws="none", lifespan="off",
        proxy_headers=False, log_config=None, log_level="error", access_log=False,
        timeout_keep_alive=int(limits.idle_seconds) + 1,  # `Connection` closes idle connections before uvicorn does
    )  # fmt: skip
    config.load()
    with _handle_signals(running):
        server = await loop.create_server(lambda: Connection(config, state, limits), sock=listener, backlog=1024)
        ready(running)
        await running.stopping.wait()
        on_stop()
        await _finish_requests(state, limits.grace_seconds)
        server.close()
        await _close_all(state)
    return running


def _refuse_when_stopping(app: App, stopping: asyncio.Event) -> App:
    """Wrap an application so that it refuses every new request, also to /health, once the server is stopping."""

    async def app_or_refusal(scope: Scope, receive: Receive, send: Send) -> None:
        if not stopping.is_set():
            return await app(scope, receive, send)
        await STOPPING.send_to(send, receive)

    return app_or_refusal


async def _finish_requests(state: ServerState, seconds: float) -> None:
    """Wait for the running requests; new requests are refused."""
    for connection in open_connections(state):
        connection.shutdown()
    if state.tasks:
        await asyncio.wait(list(state.tasks), timeout=seconds)


async def _close_all(state: ServerState) -> None:
    """Close all connections, unfinished answers too; their handlers see a disconnected client."""
    for connection in open_connections(state):
        connection.shutdown()
        if connection.awaited == "nothing" and not connection.transport.is_closing():
            connection.transport.abort()
    loop = asyncio.get_running_loop()
    end = loop.time() + CLOSING_SECONDS
    while (state.connections or state.tasks) and loop.time() < end:  # let handlers and buffers finish
        await asyncio.sleep(0.01)
    for connection in open_connections(state):
        connection.transport.abort()


@contextmanager
def _handle_signals(running: RunningServer) -> Iterator[None]:
    """Pass signals to the server; does nothing outside the main thread, where Python allows no signal handlers."""
    loop = asyncio.get_running_loop()
    signals = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for number in signals:
        loop.add_signal_handler(number, running.on_signal, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _url(listener: socket.socket) -> str:
    """Return the server's URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _limit_to_open_files(limits: ClientLimits) -> ClientLimits:
    """Raise the process's limit of open files if possible, and limit connections to it."""
    try:
        import resource
    except ImportError:  # not Unix
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = limits.connections + RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        n_files = min(n_files, hard)
    if soft != resource.RLIM_INFINITY and soft < n_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, hard))
    return replace(limits, connections=max(1, min(limits.connections, n_files - RESERVED_FILES)))


POLL_SECONDS = 0.5  # between two checks of the engine's health


def watch_engine(engine: Engine, running: RunningServer) -> None:
    """Start a daemon thread that stops a server when its engine has died or hangs."""
    threading.Thread(target=_watch, args=(engine, running), name="llorch-watch", daemon=True).start()


def _watch(engine: Engine, running: RunningServer) -> None:
    """Stop the server with an error once the engine has failed or one of its steps hangs."""
    never = threading.Event()
    while not never.wait(POLL_SECONDS):
        if engine.is_stuck:
            engine.give_up(TimeoutError("a step of the engine does not return"))
        if engine.failure is not None and not engine.draining:
            return running.stop(RuntimeError(f"serve: the engine has died: {engine.failure!r}"))
