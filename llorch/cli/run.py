"""`llorch run`: continue a prompt, or answer a message."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llorch.cli.mesh import mesh_option, of_first, on_mesh, require_tensor_parallel, timeout_option
from llorch.cli.options import (
    MODEL,
    TEXT,
    WholeNumber,
    backend_options,
    group,
    json_option,
    numerics_options,
    page_option,
    sampling_options,
    template_options,
    template_settings,
    threads_option,
    use_threads,
    verb,
)
from llorch.cli.output import say, to_json

if TYPE_CHECKING:
    from llorch.ops.numerics import Numerics
    from llorch.pytorch.distributed.launch import DeviceMesh

OURS = "reference"  # as an implementation


@verb(
    "Continue a prompt, or answer a message.",
    'llorch run story "Once upon a time"',
    'llorch run story "The little fox" -n 60 -t 0.8 --top-p 0.95 --seed 7',
    'llorch run model.gguf --chat "Why is the sky blue?" --system "Be brief."',
    page="run.md",
)
@click.argument("model", type=MODEL, default="story")
@click.argument("prompt", type=TEXT, required=False)
@group(
    "Input",
    page_option("--chat", type=TEXT, help="Message of the user; - reads stdin."),
    page_option("--system", type=TEXT, help="System message, with --chat."),
    page_option(
        "--history", type=click.Path(path_type=Path, dir_okay=False),
        help="Earlier messages, a JSON list or JSON lines.",
    ),
)  # fmt: skip
@group(
    "Output",
    page_option(
        "-n", "--max-tokens", type=WholeNumber(min=1), default=128, show_default=True, help="Most tokens written."
    ),
    page_option("--stop", type=TEXT, multiple=True, help="Text to stop before; repeatable."),
    page_option("--ignore-eos", is_flag=True, help="No stop at an end token."),
    json_option("One JSON line per token: id, text, logprob, finish."),
    page_option("-v", "--verbose", is_flag=True, help="Rates on stderr."),
)
@sampling_options
@template_options
@group(
    "Model",
    page_option("--adapter", type=click.Path(path_type=Path), help="LoRA adapter: PEFT directory or GGUF file."),
    page_option("--any-base", is_flag=True, help="Permission for an adapter of another base."),
    page_option(
        "--impl",
        help="Your own functions, a folder or cmd:PROGRAM.  [default: LLORCH_IMPL, else impl of [tool.llorch] in "
        "pyproject.toml]",
    ),
)  # fmt: skip
@numerics_options
@backend_options
@mesh_option
@timeout_option
@group("Machine", page_option("--compile", "compiled", is_flag=True, help="Decoding through torch.compile, on torch."))
@threads_option
def command(
    *, model: str, prompt: str | None, chat: str | None, system: str | None, history: Path | None, max_tokens: int,
    stop: tuple[str, ...], ignore_eos: bool, adapter: Path | None, any_base: bool, impl: str | None,
    numerics: str | None, kv_cache: str, residency: Any, backend: str, device: str | None, dtype: str | None,
    kernels: Any, axes: Mapping[str, int] | None, rank_timeout: float, compiled: bool, as_json: bool,
    verbose: bool, template_date: datetime | None, chat_template_kwargs: "dict | None", **sampling: Any,
) -> None:  # fmt: skip
    """Continue PROMPT with MODEL, or answer a chat message; print text as it is made.

    MODEL is a file, a folder or a name (see llorch --help; default: story). Without PROMPT, or with -, the prompt is
    read from stdin.
    """
    from llorch.cli.inputs import chosen_numerics, model_path
    from llorch.ops.numerics import EXACT
    from llorch.ops.sampling import SamplingSettings

    settings, template = SamplingSettings(**sampling), template_settings(template_date, chat_template_kwargs)
    backend = "torch" if axes else backend
    require_tensor_parallel(
        axes, {"--device": device not in (None, "cpu"), "--compile": compiled, "--adapter": adapter, "--impl": impl}
    )
    refuse_misplaced(backend, device, dtype, kernels, numerics, kv_cache, compiled=compiled)
    if any_base and adapter is None:
        raise click.UsageError("--any-base goes with --adapter")
    arithmetic = chosen_numerics(numerics, kv_cache)
    path = model_path(model)  # first: a prompt without MODEL before it is taken for a model, which this then says
    with on_mesh(axes, rank_timeout=rank_timeout) as mesh:
        if settings.temperature == 0 and (settings.top_k, settings.top_p, settings.min_p) != (0, 1.0, 0.0):
            say("note: --top-k, --top-p and --min-p have no effect at temperature 0; set -t")
        text, messages = of_first(mesh, lambda: _read_input(prompt, chat, system, history))
        _use_parts(impl, can=backend == "numpy" and arithmetic == EXACT and adapter is None)
        timing = Timing()
        most = _n_bytes(text, messages) + max_tokens  # a token stands for a byte or more
        if mesh is None:
            loaded = open_model(
                path, backend, arithmetic, device=device, dtype=dtype, kernels=kernels, compiled=compiled,
                residency=residency, n_tokens=most,
            )  # fmt: skip
        else:
            loaded = _open_part(path, mesh, dtype=dtype, kernels=kernels, residency=residency, n_tokens=most)
        for note in loaded.weights.notes_on_left_out("not used"):
            say(f"note: {note}")
        if messages is not None:  # every rank writes the same date
            loaded.chats.settings = replace(template, time=of_first(mesh, lambda: template.time or datetime.now()))
        threads = use_threads(loaded.config)
        name = None if adapter is None else load_adapter(loaded, adapter, any_base=any_base)
        tokens = loaded.generate(
            text, messages=messages, max_tokens=max_tokens, settings=settings, stop=stop, ignore_eos=ignore_eos,
            adapter=name,
        )  # fmt: skip
        finish = _print_tokens(timing.watch(tokens), as_json=as_json)
        if finish == "length" and timing.n_tokens < max_tokens:
            say(f"note: the context of {loaded.config.max_position_embeddings} tokens is full, the text ends here")
        if verbose:
            where = f", {loaded.where}" if backend == "torch" else ""
            n_prompt = len(loaded.prompt_ids(messages or text))
            say(f"{loaded.name}{where}: {timing.describe(n_prompt)}; end: {finish}; {threads}")


def _read_input(
    prompt: str | None, chat: str | None, system: str | None, history: Path | None
) -> tuple[str | None, list[dict[str, object]] | None]:
    """Read a text to continue, or a conversation."""
    from llorch.cli.inputs import conversation, prompt_text

    messages = conversation(chat, system, history)
    if messages is not None and prompt is not None:
        raise click.UsageError("give PROMPT, or --chat and --history, not both")
    return (prompt_text(prompt) if messages is None else None), messages


def _n_bytes(text: str | None, messages: list[dict[str, object]] | None) -> int:
    """Bound the length of a prompt in bytes; a template adds little to messages beside 1024."""
    return len(text.encode()) if text is not None else len(json.dumps(messages)) + 1024


def refuse_misplaced(
    backend: str, device: str | None, dtype: str | None, kernels: str, numerics: str | None, kv_cache: str,
    *, compiled: bool = False,
) -> None:  # fmt: skip
    """Raise a usage error for options that mean nothing to the backend."""
    if backend == "numpy":
        given = {"--device": device, "--dtype": dtype, "--kernels": kernels != "auto", "--compile": compiled}
        other = "torch; the NumPy path runs on the CPU in float32"
    else:
        given = {f"--numerics {numerics}": numerics not in (None, "exact"), "--kv-cache f16": kv_cache == "f16"}
        other = "numpy; the torch path always computes in exact numerics"
    for option, value in given.items():
        if value:
            raise click.UsageError(f"{option} goes with --backend {other}")


def _use_parts(impl: str | None, *, can: bool) -> None:
    """Replace llorch's functions by those that a learner has written until the command ends, and name them."""
    from llorch.apps.learn.choice import chosen, opened
    from llorch.apps.learn.lessons import BY_NUMBER, LESSONS

    if impl not in (None, OURS) and not can:
        raise click.UsageError("--impl goes with --backend numpy and exact numerics, without --adapter")
    if impl == OURS or not can or (spec := chosen(impl)) is None:
        return
    implementation = opened(spec)
    parts = [exercise for lesson in LESSONS[: LESSONS.index(BY_NUMBER["12"]) + 1] for exercise in lesson.parts]
    borrowed = implementation.unwritten(parts)
    own = [exercise.name for exercise in parts if exercise.name not in borrowed]
    say(f"{spec}: your functions: {', '.join(own) or 'none'}; borrowed from llorch: {', '.join(borrowed) or 'none'}")
    click.get_current_context().with_resource(implementation.installed(parts, live=True))


def load_adapter(loaded: Any, adapter: Path, *, any_base: bool) -> str:
    """Load an adapter into a model, print the check of its base, and return the name of the adapter."""
    say(f"{adapter}: {loaded.add_adapter('adapter', adapter, any_base=any_base)}")
    return "adapter"


def open_model(
    path: Path, backend: str, arithmetic: "Numerics", *, device: str | None, dtype: str | None, kernels: Any,
    residency: Any, n_tokens: int, **only_torch: Any,
) -> Any:  # fmt: skip
    """Open a model on a backend; say where the matrices of the NumPy path lie."""
    if backend == "torch":
        from llorch import load_torch  # from there: it says what to install where torch is absent

        return load_torch(
            path, device=device or "cpu", dtype=dtype or "float32", kernels=kernels, residency=residency,
            n_tokens=n_tokens, **only_torch,
        )  # fmt: skip
    from llorch.cli.inputs import say_plan
    from llorch.model.model import load

    loaded = load(path, numerics=arithmetic, residency=residency, n_tokens=n_tokens)
    say_plan(loaded)
    return loaded


def _open_part(path: Path, mesh: "DeviceMesh", *, dtype: str | None, **wanted: Any) -> Any:
    """Open the part of a model that this rank of a mesh computes."""
    from llorch import load_torch  # noqa: F401 (it says what to install where torch is absent)
    from llorch.pytorch.distributed.parallel_model import load_parallel

    return load_parallel(path, mesh, dtype=dtype or "float32", **wanted)


class Timing:
    """How long a generation took; the first token stands for reading the prompt."""

    def __init__(self) -> None:
        """Start the clock."""
        self.n_tokens = 0
        self._start = self._first = self._last = time.perf_counter()

    def watch(self, tokens: Iterator) -> Iterator:
        """Pass tokens on and note when they come."""
        for token in tokens:
            self._last = time.perf_counter()
            if self.n_tokens == 0:
                self._first = self._last
            self.n_tokens += 1
            yield token

    def describe(self, n_prompt: int) -> str:
        """Write the rates in one line."""
        prefill, decode = self._first - self._start, self._last - self._first
        line = f"prompt {n_prompt} tokens in {prefill:.3f} s ({n_prompt / prefill:.1f} tokens/s, loading included)"
        n_more = self.n_tokens - 1
        if n_more < 1:
            return line
        return f"{line}; {n_more} more tokens in {decode:.3f} s ({n_more / decode:.1f} tokens/s)"


def _print_tokens(tokens: Iterator, *, as_json: bool) -> str | None:
    """Print each token when it comes; returns why they ended."""
    finish = None
    for token in tokens:
        sys.stdout.write(to_json(asdict(token)) + "\n" if as_json else token.text)
        sys.stdout.flush()
        finish = token.finish
    sys.stdout.write("" if as_json else "\n")
    return finish
