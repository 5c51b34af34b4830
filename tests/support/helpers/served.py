"""A real server on a port of its own, in a thread: what `llorch serve` runs, without its process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import uvicorn
from openai import OpenAI
from starlette.types import ASGIApp

from llorch.apps.serve.app import make_app
from llorch.apps.serve.engine import Engine
from llorch.apps.serve.scheduler import Turns
from llorch.apps.serve.service import Service
from llorch.model.generate import GenerationBatch
from llorch.model.model import Model, load


@dataclass
class Served:
    """A server that runs."""

    service: Service
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @cached_property
    def client(self) -> OpenAI:
        """The real client, which asks once."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@contextmanager
def served(
    model: Model | str = "story", *, batch: GenerationBatch | None = None, n_jobs: int = 4, n_waiting: int = 32,
    context: int = 512, timeout: float = 60.0, stuck_after: float = 600.0,
) -> Iterator[Served]:  # fmt: skip
    """Serve a model: with Turns, or a batch of the test's own."""
    opened = load(model) if isinstance(model, str) else model
    batch = batch or Turns(opened, n_jobs=n_jobs)
    engine = Engine(batch, n_jobs=n_jobs, n_waiting=n_waiting, stuck_after=stuck_after)
    engine.start()
    service = Service(opened, engine, context=context, timeout=timeout, version="1")
    try:
        with listening(make_app(service)) as port:
            running = Served(service, port)
            with running.client:
                yield running
    finally:
        engine.stop()


@contextmanager
def listening(app: ASGIApp) -> Iterator[int]:
    """Run an app in a thread; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
