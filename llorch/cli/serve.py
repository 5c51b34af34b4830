"""`llorch serve`: serve the OpenAI interface."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import llorch
from llorch.cli.implementation import IN_OTHER_THREADS, implementation_option, use_implementation
from llorch.cli.model_options import ModelOptions, model_options, template_options
from llorch.cli.options import MODEL, RealNumber, WholeNumber, group, page_option, verb
from llorch.cli.outcome import explain
from llorch.cli.output import say
from llorch.cli.threads import threads_option, use_threads
from llorch.runtime.errors import MissingExtra

if TYPE_CHECKING:
    from datetime import datetime

    from llorch.model.generate import GenerationBatch

CONTEXT = 4096  # default tokens of prompt and answer


class NamedPath(click.ParamType):
    """Parameter type `NAME=PATH`."""

    name = "NAME=PATH"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Split it at the first `=`; `add_adapter` checks if the name is allowed."""
        name, separator, path = str(value).partition("=")
        if not (name and separator and path):
            self.fail(f"expected NAME=PATH, such as pirate=my-adapter, got {value!r}", param, ctx)
        return name, Path(path)


class Origin(click.ParamType):
    """Origin of a web page, as a browser sends it: `https://chat.example:3000`, or `null`."""

    name = "ORIGIN"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Take one origin exactly; no wildcard."""
        if value != "null" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+", str(value)):
            self.fail(f"expected one origin, such as http://localhost:3000, or null, got {value!r}", param, ctx)
        return value


@verb(
    "Serve the OpenAI interface over HTTP.",
    "llorch serve story",
    "llorch serve model.gguf --backend torch --parallel 8 --queue 64",
    "llorch serve model.gguf --adapter pirate=my-adapter",
    page="serve.md",
)
@click.argument("model", type=MODEL, default="story")
@group(
    "Network",
    page_option("--host", default="127.0.0.1", show_default=True, help="Address; others need a key."),
    page_option("--port", type=WholeNumber(0, 65535), default=8080, show_default=True, help="Port; 0: a free one."),
    page_option("--api-key", envvar="LLORCH_API_KEY", help="Key for clients.  [default: LLORCH_API_KEY]"),
    page_option("--allow-host", multiple=True, help="Host name that clients may use; repeatable."),
    page_option(
        "--allow-origin", type=Origin(), multiple=True,
        help="Origin of web pages that may call; repeatable.",
    ),
)  # fmt: skip
@group(
    "Requests",
    page_option("--parallel", type=WholeNumber(1, 256), default=4, show_default=True, help="Parallel answers."),
    page_option("--queue", type=WholeNumber(0, 4096), default=32, show_default=True, help="Requests that may wait."),
    page_option(
        "--timeout", type=RealNumber(min=1, max=1e6), default=600.0, show_default=True, help="Seconds for a request."
    ),
    page_option(
        "--ctx", type=WholeNumber(min=1),
        help=f"Tokens of prompt and answer.  [default: at most {CONTEXT}]",
    ),
)  # fmt: skip
@group(
    "Model",
    page_option(
        "--adapter", "adapters", type=NamedPath(), multiple=True, help="LoRA adapter, as model:NAME; repeatable."
    ),
    page_option("--any-base", is_flag=True, help="Permission for an adapter of another base."),
)
@implementation_option("Your own functions, as for llorch run.")
@template_options
@model_options
@group(
    "Numerics",
    page_option(
        "--mode", type=click.Choice(["fast", "reproducible"]), default="fast", show_default=True,
        help="Fast answers, or equal bits under any load, on torch.",
    ),
)  # fmt: skip
@threads_option
@group("Output", page_option("-v", "--verbose", is_flag=True, help="Line on stderr for each request."))
def command(
    *, model: str, host: str, port: int, api_key: str | None, allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...], parallel: int, queue: int, timeout: float, adapters: tuple[tuple[str, Path], ...],
    any_base: bool, impl: str | None, verbose: bool, ctx: int | None, mode: str, template_date: "datetime | None",
    chat_template_kwargs: "dict | None", **model_options_given: Any,
) -> None:  # fmt: skip
    """Serve MODEL (default: story) to the openai client, curl and a browser.

    /openapi.json describes all routes. Ctrl-C or SIGTERM ends the server.
    """
    from llorch.files.tokenizer.chat import TemplateSettings
    from llorch.runtime.threads import end_waiting_threads

    try:
        from llorch.apps.serve.app import make_app
        from llorch.apps.serve.engine import Engine
        from llorch.apps.serve.guard import Guard, require_key
        from llorch.apps.serve.server import RunningServer, bind, serve, watch_engine
        from llorch.apps.serve.service import Service
    except ModuleNotFoundError as error:
        raise MissingExtra("serve", error.name or "starlette") from None

    with ExitStack() as stack:
        listening_socket = stack.enter_context(bind(host, port))
        require_key(listening_socket, api_key)
        if ctx is not None:
            _require_context(model, ctx)
        options = ModelOptions(**model_options_given)
        loaded, batch = _open_batch(model, options, mode, parallel, ctx or CONTEXT, impl, has_adapter=bool(adapters))
        loaded.chats.settings = TemplateSettings(chat_template_kwargs, template_date)
        threads = use_threads(loaded.config)
        for name, path in adapters:
            say(f"{path}: {loaded.add_adapter(name, path, any_base=any_base)}")
        engine = Engine(batch, n_jobs=parallel, n_waiting=queue, stuck_after=timeout)
        service = Service(loaded, engine, context=ctx or CONTEXT, timeout=timeout, version=llorch.__version__)
        end_waiting_threads()  # frees the threads that loaded the model
        engine.start()
        stack.callback(engine.stop)

        def ready(running: RunningServer) -> None:
            watch_engine(engine, running)
            template_note = "" if service.has_template else " (no chat template: chats are plain text)"
            say(f"llorch: {', '.join(service.names)} at {running.url}{template_note}; {threads}")

        log, hosts = say if verbose else None, (host, *allow_host)
        app = Guard(make_app(service), key=api_key, hosts=hosts, origins=allow_origin, log=log)
        serve(app, listening_socket, ready=ready, on_stop=engine.drain)


def _require_context(model: str, context: int) -> None:
    """Raise UsageError if a model has fewer positions than `context`; no weights are loaded for this."""
    from llorch.cli.inputs import model_path
    from llorch.files import open_weights

    n_positions = open_weights(model_path(model)).config.max_position_embeddings
    if context > n_positions:
        raise click.UsageError(f"--ctx: expected at most {n_positions}, the context length of {model}, got {context}")


def _open_batch(
    model: str, options: ModelOptions, mode: str, n_jobs: int, context: int, impl: str | None, *, has_adapter: bool
) -> "tuple[Any, GenerationBatch]":
    """Open a model and the batch that runs its jobs: on NumPy one token of one job at a time, in turn."""
    from llorch.apps.serve.scheduler import Turns
    from llorch.cli.inputs import model_path

    arithmetic, path = options.arithmetic(), model_path(model)
    if options.backend == "numpy" and mode != "fast":
        raise click.UsageError("--mode reproducible goes with --backend torch; the NumPy path never batches answers")
    options, is_exact = use_implementation(
        impl, path, options, arithmetic, has_adapter=has_adapter, excluded=IN_OTHER_THREADS
    )
    loaded = options.open(path, arithmetic, n_tokens=n_jobs * context, is_exact=is_exact, mode=mode)
    if options.backend == "numpy":
        return loaded, Turns(loaded, n_jobs=n_jobs, report_fault=explain)
    from llorch.pytorch.serving.batch import ContinuousBatch

    context = min(context, loaded.config.max_position_embeddings)
    return loaded, ContinuousBatch(loaded, n_jobs=n_jobs, n_tokens=n_jobs * context)
