"""The work of `llorch verify`: judge each model with stored goldens or live engines, and report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import click

from llorch.builtin import BUILTIN
from llorch.cli.inputs import choose_ids, model_path
from llorch.cli.judged import Judged, summary
from llorch.cli.outcome import DIFFERS, MISSING, OK
from llorch.cli.output import progress, say, to_json
from llorch.cli.report import LEGEND, print_end, print_model
from llorch.cli.tables import console
from llorch.errors import MissingExtra
from llorch.model import load
from llorch.producers import ProducerName
from llorch.verify import verify_live, verify_stored

_PACKAGES = {"llamacpp": ("llama_cpp",), "transformers": ("torch", "transformers")}

MIN_DISTINCT = 8  # fewer distinct tokens hide some mistakes

Say = Callable[[str], None]


def judge_all(
    models: Sequence[str],
    against: Sequence[str],
    *,
    prompt: str | None,
    tokens: list[int] | None,
    as_json: bool,
    detail: bool,
) -> int:
    """Judge models one after the other and report each as soon as it is done.

    Args:
        models: Built-in names and paths; none stands for all built-in models.
        against: `golden` or producers; none stands for goldens of built-in models and all producers of others.
        prompt: Text for live engines.
        tokens: Ids for live engines.
        as_json: Print one JSON object at the end instead of tables.
        detail: A line per stage.

    Returns:
        The exit code.
    """
    has_input = prompt is not None or tokens is not None
    plans = [(spec, *_plan(spec, against, has_input=has_input)) for spec in dict.fromkeys(models or BUILTIN)]
    out = console()
    done: list[Judged] = []
    for spec, path, engines in plans:
        with progress(f"verifying {spec}") as tell:
            judged = _live(path, engines, prompt, tokens, tell) if engines else _stored(spec)
        done.append(judged)
        if not as_json:
            print_model(out, judged, detail=detail)
    if as_json:
        rows = [asdict(row) for judged in done for row in judged.rows]
        click.echo(to_json({"rows": rows, "summary": summary(done)}))
    else:
        out.print(LEGEND)
        print_end(out, done)
    return _exit_code(summary(done))


def _plan(spec: str, against: Sequence[str], *, has_input: bool) -> tuple[Path, tuple[ProducerName, ...]]:
    """The path of a model and the engines to run; none means stored goldens."""
    path = model_path(spec)
    stored = spec in BUILTIN and not Path(spec).exists()
    if "golden" in against and not stored:
        raise click.UsageError(f"{spec}: only built-in models have goldens; use --against llamacpp or transformers")
    if stored and not set(against) - {"golden"}:
        if has_input:
            raise click.UsageError(f"{spec}: goldens have their own input; add --against llamacpp to run another")
        return path, ()
    return path, tuple(p for p in get_args(ProducerName) if not against or p in against)


def _stored(name: str) -> Judged:
    try:
        return Judged(name, list(verify_stored(name)))
    except FileNotFoundError as error:
        return Judged(name, [], [str(error)])


def _live(
    path: Path, engines: Sequence[ProducerName], prompt: str | None, tokens: list[int] | None, tell: Say
) -> Judged:
    model = load(path)
    ids, text = choose_ids(model, prompt, tokens)
    _check_length(len(ids), model.config.max_position_embeddings)
    if len(set(ids)) < MIN_DISTINCT:
        say(f"warning: distinct tokens: {len(set(ids))}; some mistakes cannot show with fewer than {MIN_DISTINCT}")
    absent = {engine: missing for engine in engines if (missing := _missing_package(engine)) is not None}
    usable: list[ProducerName] = [engine for engine in engines if engine not in absent]
    failed: dict[str, str] = {}
    rows = list(verify_live(path, ids, usable, text=text, say=tell, failed=failed)) if usable else []
    reasons = {engine: str(MissingExtra("golden", package)) for engine, package in absent.items()} | failed
    return Judged(model.name, rows, [f"{engine}: {reason}" for engine, reason in reasons.items()])


def _check_length(n_ids: int, context: int) -> None:
    """Refuse a prompt that does not fit before the engines work on it for minutes."""
    if n_ids > context:
        raise ValueError(
            f"verify: {n_ids} tokens do not fit the context of {context}; give fewer --tokens or a shorter --prompt"
        )


def _missing_package(engine: str) -> str | None:
    return next((package for package in _PACKAGES[engine] if find_spec(package) is None), None)


def _exit_code(counts: dict) -> int:
    if counts["failed"]:
        return DIFFERS
    return MISSING if counts["not_run"] or counts["checkpoints_not_run"] else OK
