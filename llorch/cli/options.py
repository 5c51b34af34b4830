"""What several verbs share on their command lines; nothing heavy is imported for it."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from glob import glob
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from llorch.cli.verbs import Verb, page_option
from llorch.runtime.builtin import EVERY
from llorch.runtime.errors import decode_utf8

if TYPE_CHECKING:
    from datetime import datetime

    from llorch.families.config import ModelConfig
    from llorch.files.tokenizer.chat import TemplateSettings

ENGINES = ("llamacpp", "transformers")
SPINS = "3000"  # of a waiting thread, some 0.1 ms: from one product of a token to the next, and no more


MOST = 2**31 - 1  # of a count: libraries hold it in 32 bits


class WholeNumber(click.IntRange):
    """An integer in a range; click calls other text no valid "integer range", which says nothing."""

    name = "integer"

    def __init__(self, min: int | None = None, max: int = MOST) -> None:
        """Take an integer from `min` to `max`."""
        super().__init__(min, max)


class RealNumber(click.FloatRange):
    """A finite number in a range; click's takes nan and inf."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value}", param, ctx)
        return number


SECONDS = RealNumber(min=0, min_open=True, max=1e6)  # of a time limit; some waits hold milliseconds in 32 bits
SEED = WholeNumber(max=2**63 - 1)  # that torch takes


class UnicodeText(click.ParamType):
    """Text for a model; an argument may hold bytes that are not UTF-8, which Python hands on as surrogates."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Decode the bytes of the argument, whatever the locale says about them."""
        if not isinstance(value, str):
            return value
        where = "text" if param is None or ctx is None else param.get_error_hint(ctx).replace("'", "")
        return decode_utf8(os.fsencode(value), where)


TEXT = UnicodeText()


class TokenIds(click.ParamType):
    """Token ids, `1,2,3`."""

    name = "1,2,3"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Parse the list; whether an id exists is the model's business."""
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        for place, part in enumerate(parts, start=1):
            if re.fullmatch("[0-9]{1,9}", part) is None:
                self.fail(f"expected token ids such as 1,2,3, got {part!r} (entry {place})", param, ctx)
        return [int(part) for part in parts]


class ModelSpec(click.ParamType):
    """What stands for a model; `llorch.cli.inputs.model_path` finds it."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of built-in models and of models in this folder; otherwise complete files."""
        here = sorted([*glob("*.gguf"), *map(os.path.dirname, glob("*/config.json"))])
        names = [name for name in (*EVERY, *here) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


MODEL = ModelSpec()


def verb(
    summary: str, *examples: str, page: str = "", foreign: Mapping[str, str] = {}, common: Collection[str] = ()
) -> Callable[[Callable], click.Command]:
    """Make a command with a help page; see `Page` and `Verb` for `page`, `common` and `foreign`.

    The help page of the group shows the summary, that of the command its docstring.
    """
    return click.command(cls=Verb, short_help=summary, examples=examples, page=page, foreign=foreign, common=common)


def group(title: str, *options: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    """Put options below `title` on a help page, in this order; without a title each stays below its own."""

    def decorate(function: Callable) -> Callable:
        before = len(getattr(function, "__click_params__", ()))
        made = reduce(lambda made, option: option(made), reversed(options), function)
        for param in vars(made)["__click_params__"][before:]:
            param.group = title or param.group
        return made

    return decorate


def tokens_option(text: str) -> Callable[[Callable], Callable]:
    """Add the option `--tokens 1,2,3`, for models without a vocabulary."""
    return group("Input", page_option("--tokens", type=TokenIds(), help=text))


def json_option(text: str) -> Callable[[Callable], Callable]:
    """Make the option `--json` with a help text."""
    return group("Output", page_option("--json", "as_json", is_flag=True, help=text))


residency_option = page_option(
    "--weights", "residency", type=click.Choice(["auto", "decoded", "packed"]), default="auto", show_default=True,
    help="Form of matrices in memory.",
)  # fmt: skip


def _backend(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """Return the backend that was asked for, or torch if an option that only torch has was given before."""
    on_torch = ctx.params["device"] or ctx.params["dtype"] or ctx.params["kernels"] != "auto"
    return value or ("torch" if on_torch else "numpy")


def numerics_group(default: str) -> Callable[[Callable], Callable]:
    """Add the options for arithmetic to a verb; `default` is what the help page says of `--numerics`."""
    return group(
        "Numerics",
        page_option(
            "--numerics", type=click.Choice(["exact", "ggml", "scheme"]), metavar="KIND",
            help="exact; ggml: rounds inputs as llama.cpp does; scheme: as a quantised folder says.  "
            f"[default: {default}]",
        ),
        page_option(
            "--kv-cache", type=click.Choice(["f32", "f16"]), default="f32", show_default=True,
            help="Type of the KV cache, with ggml.",
        ),
        residency_option,
    )  # fmt: skip


def backend_group(dtypes: str) -> Callable[[Callable], Callable]:
    """Add the options of the forward pass and its device; `dtypes` is the default of `--dtype` on the help page."""
    numerics = group(
        "Numerics",
        page_option(
            "--dtype", type=click.Choice(["float32", "bfloat16", "float16", "float64"]), is_eager=True,
            help=f"Number type on torch.  [default: {dtypes}]",
        ),
        page_option(
            "--kernels", type=click.Choice(["auto", "torch", "own"]), default="auto", is_eager=True, show_default=True,
            help="Kernels on torch; auto: llorch's, on CUDA only if correct and no slower.",
        ),
    )  # fmt: skip
    machine = group(
        "Machine",
        page_option(
            "--backend", type=click.Choice(["numpy", "torch"]), callback=_backend,
            help="Forward pass.  [default: numpy; torch with --device, --dtype or --kernels]",
        ),
        page_option("--device", is_eager=True, help="Device: cpu, cuda or cuda:N.  [default: cpu]"),
    )  # fmt: skip
    return group("", numerics, machine)


numerics_options = numerics_group("exact")
backend_options = backend_group("float32")


class JsonObject(click.ParamType):
    """A JSON object, such as `{"enable_thinking": false}`."""

    name = "json"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Parse the text."""
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"expected a JSON object, got {value!r}: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"expected a JSON object, got {value!r}", param, ctx)
        return parsed


template_options = group(  # of `TemplateSettings`; `template_settings` reads them
    "Chat template",
    page_option(
        "--template-date", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD",
        help="Date in the template.  [default: today]",
    ),
    page_option(
        "--chat-template-kwargs", type=JsonObject(), help='Variables, as in \'{"enable_thinking": false}\'.'
    ),
)  # fmt: skip


def template_settings(template_date: "datetime | None", chat_template_kwargs: "dict | None") -> "TemplateSettings":
    """Read the values of `template_options`."""
    from llorch.files.tokenizer.chat import TemplateSettings

    return TemplateSettings(chat_template_kwargs, template_date)


sampling_options = group(  # names of `SamplingSettings`
    "Sampling",
    page_option("-t", "--temperature", default=0.0, show_default=True, help="Temperature; 0: best token."),
    page_option("--top-k", type=WholeNumber(), default=0, show_default=True, help="Number of tokens kept; 0: all."),
    page_option("--top-p", default=1.0, show_default=True, help="Probability mass kept."),
    page_option("--min-p", default=0.0, show_default=True, help="Least probability, as a share of the best token's."),
    page_option("--repetition-penalty", default=1.0, show_default=True, help="Penalty; 1: none."),
    page_option("--seed", type=SEED, default=0, show_default=True, help="Seed of the draws."),
)


def refuse_both(prompt: str | None, tokens: list[int] | None) -> None:
    """Raise a usage error when there is text and ids."""
    if prompt is not None and tokens is not None:
        raise click.UsageError("give a prompt or --tokens, not both")


_WANTED = "llorch.runtime.threads"


def _remember(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Keep the wanted number of threads in the context, for `use_threads`."""
    ctx.meta[_WANTED] = value


threads_option = group(  # for whatever computes; `use_threads` reads it
    "Machine",
    page_option(
        "--threads", type=WholeNumber(min=1, max=1024), expose_value=False, callback=_remember,
        help="Number of CPU threads.  [default: OMP_NUM_THREADS, else all; 1 for small models]",
    ),
)  # fmt: skip


def use_threads(*configs: "ModelConfig", recorded: int | None = None) -> str:
    """Use the threads that the user says (`recorded`: said when the run began) or that suit; says how many."""
    from llorch.files.tensor_names import count_parameters
    from llorch.runtime.threads import VARIABLES, is_small, limited, n_cores

    ctx = click.get_current_context()
    n = ctx.meta.get(_WANTED) or recorded
    if n is None:
        for name in VARIABLES:
            if os.environ.get(name):
                return f"threads: {name}={os.environ[name]}"
        n_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of a mesh that share this machine
        small = all(is_small(count_parameters(config)) for config in configs)
        if not small and n_here == 1:
            return "threads: all"
        n = 1 if small else max(1, n_cores() // n_here)
    ctx.with_resource(limited(n))
    return f"threads: {n}"


def allowed_cores() -> int:
    """Return how many cores a command may use at once: `--threads` if given, else the cores of the process."""
    from llorch.runtime.threads import VARIABLES, n_cores

    said = [click.get_current_context().meta.get(_WANTED), *(os.environ.get(name) for name in VARIABLES)]
    return next((int(n) for n in said if n and str(n).isdigit()), n_cores())


def wait_asleep() -> None:
    """Let threads that wait for each other soon sleep, not spin for long; libraries read this when they are loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:  # GNU's and Intel's OpenMP: torch
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, the least: NumPy
