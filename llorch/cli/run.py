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

from llorch.cli.implementation import implementation_option, use_implementation
from llorch.cli.mesh import mesh_option, of_first, on_mesh, require_tensor_parallel, timeout_option
from llorch.cli.model_options import ModelOptions, adapter_options, model_options, sampling_options, template_options
from llorch.cli.options import FILE, MODEL, TEXT, WholeNumber, group, json_option, page_option, verb
from llorch.cli.output import say, to_json
from llorch.cli.threads import threads_option, use_threads

if TYPE_CHECKING:
    from llorch.pytorch.distributed.launch import DeviceMesh


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
    page_option("--history", type=FILE, help="Earlier messages, a JSON list or JSON lines."),
)
@group(
    "Output",
    page_option(
        "-n", "--max-tokens", type=WholeNumber(min=1), default=128, show_default=True, help="Most tokens written."
    ),
    page_option("--stop", type=TEXT, multiple=True, help="Text to stop before; repeatable."),
    page_option("--ignore-eos", is_flag=True, help="No stop at an end token."),
    json_option("One JSON line per token: id, text, logprob, finish; numerics with the last."),
    page_option("-v", "--verbose", is_flag=True, help="Rates on stderr."),
)
@sampling_options
@template_options
@group("Model", *adapter_options)
@implementation_option()
@model_options
@mesh_option
@timeout_option
@group("Machine", page_option("--compile", "compiled", is_flag=True, help="Decoding through torch.compile, on torch."))
@threads_option
def command(
    *, model: str, prompt: str | None, chat: str | None, system: str | None, history: Path | None, max_tokens: int,
    stop: tuple[str, ...], ignore_eos: bool, adapter: Path | None, any_base: bool, impl: str | None,
    axes: Mapping[str, int] | None, rank_timeout: float, compiled: bool, as_json: bool, verbose: bool,
    template_date: datetime | None, chat_template_kwargs: "dict | None", **values: Any,
) -> None:  # fmt: skip
    """Continue PROMPT with MODEL, or answer a chat message; print text as it is made.

    MODEL is a file, a folder or a name (see llorch --help; default: story). Without PROMPT, or with -, the prompt is
    read from stdin.
    """
    from llorch.cli.inputs import describe_kernels, model_path
    from llorch.files.tokenizer.chat import TemplateSettings
    from llorch.ops.sampling import SamplingSettings

    options, template = ModelOptions.from_values(values), TemplateSettings(chat_template_kwargs, template_date)
    settings = SamplingSettings(**values)
    if axes is not None:
        options = replace(options, backend="torch")
    has_device = options.device not in (None, "cpu")
    require_tensor_parallel(axes, {"--device": has_device, "--compile": compiled, "--adapter": adapter, "--impl": impl})
    arithmetic = options.arithmetic(compiled=compiled)
    if any_base and adapter is None:
        raise click.UsageError("--any-base goes with --adapter")
    path = model_path(model)  # first, so that a prompt given without MODEL fails here as an unknown model
    with on_mesh(axes, rank_timeout=rank_timeout) as mesh:
        if settings.temperature == 0 and (settings.top_k, settings.top_p, settings.min_p) != (0, 1.0, 0.0):
            say("note: --top-k, --top-p and --min-p have no effect at temperature 0; set -t")
        text, messages = of_first(mesh, lambda: _read_input(prompt, chat, system, history))
        options, is_exact = use_implementation(impl, path, options, arithmetic, has_adapter=adapter is not None)
        timing = Timing()
        max_tokens_total = _n_bytes(text, messages) + max_tokens  # a token covers at least a byte
        if mesh is None:
            loaded = options.open(path, arithmetic, n_tokens=max_tokens_total, is_exact=is_exact, compiled=compiled)
        else:
            loaded = _open_rank_model(path, mesh, options, n_tokens=max_tokens_total)
        for note in loaded.weights.notes_on_left_out("not used"):
            say(f"note: {note}")
        if messages is not None:  # every rank writes the same date
            loaded.chats.settings = replace(template, time=of_first(mesh, lambda: template.time or datetime.now()))
        threads = use_threads(loaded.config)
        tokens = loaded.generate(
            text, messages=messages, max_tokens=max_tokens, settings=settings, stop=stop, ignore_eos=ignore_eos,
            adapter=load_adapter(loaded, adapter, any_base=any_base),
        )  # fmt: skip
        finish = _print_tokens(timing.watch(tokens), str(loaded.weights.numerics), as_json=as_json)
        if finish == "length" and timing.n_tokens < max_tokens:
            say(f"note: the context of {loaded.config.max_position_embeddings} tokens is full, the text ends here")
        if verbose:
            device = loaded.where if options.backend == "torch" else describe_kernels(loaded.weights.numerics)
            n_prompt = len(loaded.prompt_ids(messages or text))
            say(f"{loaded.name}, {device}: {timing.describe(n_prompt)}; end: {finish}; {threads}")


def _read_input(
    prompt: str | None, chat: str | None, system: str | None, history: Path | None
) -> tuple[str | None, list[dict[str, object]] | None]:
    """Read a text to continue, or a conversation; the other of the two is None."""
    from llorch.cli.inputs import conversation, prompt_text

    messages = conversation(chat, system, history)
    if messages is not None and prompt is not None:
        raise click.UsageError("give PROMPT, or --chat and --history, not both")
    return (prompt_text(prompt) if messages is None else None), messages


def _n_bytes(text: str | None, messages: list[dict[str, object]] | None) -> int:
    """Bound the length of a prompt in bytes; 1024 is for what a chat template adds to the messages."""
    return len(text.encode()) if text is not None else len(json.dumps(messages)) + 1024


def load_adapter(model: Any, adapter: Path | None, *, any_base: bool) -> str | None:
    """Load an adapter into a model, if there is one; print the check of its base, and return the adapter's name."""
    if adapter is None:
        return None
    say(f"{adapter}: {model.add_adapter('adapter', adapter, any_base=any_base)}")
    return "adapter"


def _open_rank_model(path: Path, mesh: "DeviceMesh", options: ModelOptions, *, n_tokens: int) -> Any:
    """Open the part of a model that this rank (process) of a mesh computes."""
    from llorch import load_torch  # noqa: F401 (its error names the extra to install if torch is absent)
    from llorch.pytorch.distributed.parallel_model import load_parallel

    return load_parallel(
        path, mesh, dtype=options.dtype or "float32", kernels=options.torch_kernels, residency=options.residency,
        n_tokens=n_tokens,
    )  # fmt: skip


class Timing:
    """Duration of a generation; the time to the first token counts as prefill."""

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
        n_decoded = self.n_tokens - 1
        if n_decoded < 1:
            return line
        return f"{line}; {n_decoded} more tokens in {decode:.3f} s ({n_decoded / decode:.1f} tokens/s)"


def _print_tokens(tokens: Iterator, numerics: str, *, as_json: bool) -> str | None:
    """Print each token when it arrives, with `as_json` the numerics with the last; return why generation ended."""
    finish = None
    for token in tokens:
        fields = asdict(token) | ({"numerics": numerics} if token.finish is not None else {})
        sys.stdout.write(to_json(fields) + "\n" if as_json else token.text)
        sys.stdout.flush()
        finish = token.finish
    sys.stdout.write("" if as_json else "\n")
    return finish
