"""`llorch quality`: measure how much a quantised model differs from its unquantised original, on a text."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llorch.cli.model_options import numerics_options
from llorch.cli.options import MODEL, PATH, WholeNumber, group, json_option, page_option, verb
from llorch.cli.output import progress, say, to_json
from llorch.cli.threads import threads_option, use_threads
from llorch.runtime.errors import UserError, decode_utf8
from llorch.runtime.memory import available_memory

if TYPE_CHECKING:
    import numpy as np

    from llorch.apps.evaluate.scores import Estimate, ModelDifference, Prediction
    from llorch.apps.evaluate.windows import Windows
    from llorch.files.residency import Residency
    from llorch.model.model import Model
    from llorch.ops.numerics import Numerics

_TOKENIZING = 200  # bytes of memory per byte of text; measured: 173, on prose with a vocabulary of 151 thousand

Line = tuple[str, "Estimate | float"]  # name, and a figure with or without an error; in % if the name ends in (%)


@verb(
    "Measure what quantisation costs, on a text.",
    "llorch quality model.gguf model-q4_k_m.gguf --text wiki.test.raw",
    "llorch quality model.gguf model-q8_0.gguf --text wiki.test.raw --numerics ggml",
    "llorch quality model.gguf --text wiki.test.raw",
    page="quality.md",
)
@click.argument("reference", type=MODEL)
@click.argument("model", type=MODEL, required=False)
@group(
    "Input",
    page_option("--text", "path", required=True, type=PATH, help="File of UTF-8 text."),
    page_option(
        "--context", type=WholeNumber(), help="Tokens per window.  [default: 512, or the most that both models hold]"
    ),
    page_option("--windows", "limit", type=WholeNumber(min=1), help="Number of windows.  [default: all]"),
)
@numerics_options
@threads_option
@json_option("One object; each figure with its error, probabilities from 0 to 1.")
def command(
    *, reference: str, model: str | None, path: Path, context: int | None, limit: int | None, numerics: str | None,
    kv_cache: str, residency: "Residency", as_json: bool,
) -> None:  # fmt: skip
    """Compare MODEL with REFERENCE on a text: KL divergence, share of equal best tokens, perplexities.

    With REFERENCE alone, print its perplexity.
    """
    from llorch.apps.evaluate.windows import cut_text
    from llorch.cli.inputs import chosen_numerics, model_path, say_plan
    from llorch.model.model import load

    arithmetic = chosen_numerics(numerics, kv_cache)
    text = _read_text(path)
    specs = [reference] if model is None else [reference, model]
    paths = [model_path(spec) for spec in specs]
    windows = cut_text([load(path) for path in paths], text, context=context, limit=limit)
    models = load_fitting(paths, arithmetic, residency, windows.context)
    for opened_model in models:
        say_plan(opened_model)
    say(use_threads(*(opened_model.config for opened_model in models)))
    description: dict[str, Any] = {"reference": reference} if model else {}
    description |= {"model": specs[-1], "numerics": str(arithmetic), "text": str(path)}
    description |= {"context": windows.context, "windows": len(windows), "tokens": len(windows.ids)}
    scores = score_models(models, windows)
    if as_json:
        click.echo(to_json(description | asdict(scores), indent=1))
    else:
        _print_quality(description, scores)


def _read_text(path: Path) -> str:
    """Read a UTF-8 text; MemoryError if its tokens would not fit in memory, UserError if it is empty."""
    from llorch.files.mapped import read_regular

    size, free = path.stat().st_size, available_memory()
    if size * _TOKENIZING > free:
        requirement = f"{size / 1e9:.2f} GB of text need about {size * _TOKENIZING / 1e9:.1f} GB of memory"
        raise MemoryError(f"{path}: {requirement}, {free / 1e9:.1f} GB are free; give a shorter text")
    text = decode_utf8(read_regular(path, limit=size), str(path)).removesuffix("\n")
    if not text:
        raise UserError(f"{path}: expected text, the file is empty")
    return text


def load_fitting(paths: list[Path], numerics: "Numerics", residency: "Residency", n_tokens: int) -> "list[Model]":
    """Load one model or two so that they fit in memory together, packed if needed; only the last uses `numerics`."""
    models = _load_models(paths, numerics, residency, n_tokens)
    if residency == "auto" and _needed_bytes(models) > available_memory():  # load placed each as if it were alone
        models = _load_models(paths, numerics, "packed", n_tokens)
    needed_gb, free_gb = _needed_bytes(models) / 1e9, available_memory() / 1e9
    if needed_gb > free_gb:
        names = " and ".join(model.name for model in models)
        raise MemoryError(f"{names}: need about {needed_gb:.1f} GB, {free_gb:.1f} GB are free; use smaller models")
    return models


def _load_models(paths: list[Path], numerics: "Numerics", residency: "Residency", n_tokens: int) -> "list[Model]":
    """Load the models: the last with `numerics`, the others in exact arithmetic."""
    from llorch.model.model import load
    from llorch.ops.numerics import EXACT

    numerics_list = [*[EXACT] * (len(paths) - 1), numerics]
    runs = zip(paths, numerics_list, strict=True)
    return [load(path, numerics=arithmetic, residency=residency, n_tokens=n_tokens) for path, arithmetic in runs]


def _needed_bytes(models: "list[Model]") -> int:
    return sum(model.plan.needed for model in models if model.plan is not None)


def score_models(models: "list[Model]", windows: "Windows") -> "ModelDifference | Prediction":
    """Return the perplexity of one model, or the difference of the second model from the first."""
    import numpy as np

    from llorch.apps.evaluate.scores import PairScores, compare_models, summarise_losses
    from llorch.apps.evaluate.windows import score, score_pair

    if len(models) == 1:
        steps = score(models[0], windows)
        return summarise_losses(np.concatenate(_collect(steps, len(windows), "loss", lambda loss: loss)))
    reference, model = models
    steps = score_pair(reference, model, windows)
    return compare_models(PairScores.join(_collect(steps, len(windows), "KL divergence", lambda scores: scores.kl)))


def _collect(steps: Iterable[Any], n: int, name: str, values: "Callable[[Any], np.ndarray]") -> list[Any]:
    """Collect the scores of `n` windows; show the mean of `values(scores)`, called `name`, and the time left."""
    import numpy as np

    from llorch.apps.evaluate.scores import mean

    done: list[Any] = []
    start = time.monotonic()
    with progress("scoring") as update:
        for step in steps:
            done.append(step)
            mu = mean(np.concatenate([values(finished) for finished in done]))
            seconds = (time.monotonic() - start) / len(done) * (n - len(done))
            update(f"window {len(done)} of {n}, {name} {mu.value:.4g} +- {mu.error:.2g}, {seconds:.0f} s left")
    return done


def _print_quality(facts: dict[str, Any], scores: "ModelDifference | Prediction") -> None:
    from llorch.cli.tables import console, print_table, table

    out = console()
    unused = facts["tokens"] - facts["windows"] * facts["context"]
    usage = f"{facts['windows']} windows of {facts['context']} tokens, {scores.n_scored} scored, {unused} unused"
    out.print(f"{facts['text']}: {usage}")
    rows = table("figure", ">value", ">+-")
    for label, figure in _figures(scores):
        scale = 100 if label.endswith("(%)") else 1
        value, error = (figure, None) if isinstance(figure, int | float) else (figure.value, figure.error)
        rows.add_row(label, f"{scale * value:.7g}", "" if error is None else f"{scale * error:.2g}")
    print_table(out, rows)


def _figures(scores: "ModelDifference | Prediction") -> list[Line]:
    """List the printed figures of one model, or of a model against a reference: label and value."""
    from llorch.apps.evaluate.scores import Prediction

    if isinstance(scores, Prediction):
        return [("perplexity", scores.perplexity), ("loss (nats)", scores.loss)]
    return [
        ("perplexity of the reference", scores.reference_perplexity),
        ("perplexity of the model", scores.perplexity),
        ("perplexity, difference", scores.perplexity_difference),
        ("perplexity, ratio", scores.perplexity_ratio),
        ("perplexity, ln of the ratio", scores.perplexity_log_ratio),
        ("KL divergence, mean (nats)", scores.kl),
        *((f"KL divergence, {quantile}", value) for quantile, value in scores.kl_quantiles.items()),
        ("same most likely token (%)", scores.same_top),
        ("probability of the right token, RMS change (%)", scores.p_rms),
        ("probability of the right token, mean change (%)", scores.p_mean),
        ("probability of the right token, largest change (%)", scores.p_max),
    ]
