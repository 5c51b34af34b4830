"""`llorch serve`: answer the OpenAI interface."""

from pathlib import Path
from typing import Any

import click

import llorch
from llorch.cli.options import (
    WholeNumber,
    backend_options,
    numerics_options,
    threads_option,
    use_threads,
    verb,
)
from llorch.cli.output import say

CONTEXT = 8192


class Named(click.ParamType):
    """`NAME=PATH`."""

    name = "NAME=PATH"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Take it apart; whether the name can be one is the model's business."""
        name, found, path = str(value).partition("=")
        if not (name and found and path):
            self.fail(f"expected NAME=PATH, such as pirate=my-adapter, got {value!r}", param, ctx)
        return name, Path(path)


@verb(
    "Answer the OpenAI interface over HTTP.",
    "llorch serve story",
    "llorch serve model.gguf --port 9000 --parallel 8 --queue 64",
    "llorch serve model.gguf --adapter pirate=my-adapter       as model:pirate",
)
@click.argument("model", default="story")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--parallel", type=WholeNumber(1, 256), default=4, show_default=True, help="Answers that run at a time.")
@click.option("--queue", type=WholeNumber(0, 4096), default=32, show_default=True, help="More of them that may wait.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds a request.")
@click.option(
    "--ctx", type=WholeNumber(min=1), help=f"Tokens of prompt and answer.  [default: the model's, {CONTEXT} at most]"
)
@click.option(
    "--adapter", "adapters", type=Named(), multiple=True, help="LoRA, as model:NAME; may be given several times."
)
@click.option(
    "--api-key", metavar="KEY", envvar=("LLORCH_API_KEY", "LLORCH_SERVE_API_KEY"),
    help="What clients have to know on every route but /health.  [default: LLORCH_API_KEY]",
)  # fmt: skip
@click.option("--allow-host", multiple=True, metavar="NAME", help="Another name of the server; may be repeated.")
@click.option("--any-base", is_flag=True, help="Take an --adapter that names another base.")
@numerics_options
@backend_options
@threads_option
@click.option("-v", "--verbose", is_flag=True, help="A line on stderr for each request: route, status, time; no text.")
def command(
    *, model: str, host: str, port: int, parallel: int, queue: int, timeout: float, ctx: int | None,
    adapters: tuple[tuple[str, Path], ...], api_key: str | None, allow_host: tuple[str, ...], verbose: bool,
    any_base: bool, numerics: str | None, kv_cache: str, residency: Any, backend: str,
    device: str | None, dtype: str | None, kernels: Any,
) -> None:  # fmt: skip
    """Serve MODEL (default: story): /v1/chat/completions, /v1/models, /health, /metrics.

    One line on stderr says when it is ready, and where. It ends with Ctrl-C or SIGTERM.
    """
    from llorch.cli.inputs import chosen_numerics, model_path, say_plan
    from llorch.errors import MissingExtra
    from llorch.model import load

    try:
        from llorch.serve.app import make_app
        from llorch.serve.engine import Engine
        from llorch.serve.guard import Guard, require_key
        from llorch.serve.listening import Running, bind, serve
        from llorch.serve.service import Service
        from llorch.serve.turns import Turns
        from llorch.serve.watching import watch
    except ModuleNotFoundError as error:
        raise MissingExtra("serve", error.name or "starlette") from None

    bound = bind(host, port)
    require_key(bound, api_key)
    arithmetic, room = chosen_numerics(numerics, kv_cache), ctx or CONTEXT
    loaded = load(model_path(model), numerics=arithmetic, residency=residency, n_tokens=parallel * room)
    say_plan(loaded)
    threads = use_threads(loaded.config)
    for name, path in adapters:
        say(f"{path}: {loaded.add_adapter(name, path, any_base=any_base)}")
    engine = Engine(Turns(loaded, n_jobs=parallel), n_jobs=parallel, n_waiting=queue, stuck_after=timeout)
    service = Service(loaded, engine, context=room, timeout=timeout, version=llorch.__version__)
    engine.start()
    app = Guard(make_app(service), key=api_key, hosts=(host, *allow_host), log=say if verbose else None)

    def ready(running: Running) -> None:
        watch(engine, running)
        say(f"llorch: {', '.join(service.names)} at {running.url}; {threads}")

    try:
        serve(app, bound, ready=ready, on_stop=engine.drain)
    finally:
        engine.stop()
