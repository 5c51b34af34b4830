"""The work of `llorch verify`: judge each model with stored goldens or live engines, and report."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from llorch.builtin import EVERY, IN_WHEEL, builtin_path, goldens_folder, is_wheel
from llorch.cli.inputs import choose_ids, chosen_numerics, model_path, say_plan
from llorch.cli.judged import KERNELS, TRAINING, JudgedModel, checkpoints_of, summary
from llorch.cli.options import allowed_cores, use_threads
from llorch.cli.outcome import DIFFERS, MISSING, OK
from llorch.cli.output import progress, say, to_json
from llorch.cli.report import print_end, print_model
from llorch.cli.tables import console
from llorch.cli.workers import Workers
from llorch.config import ModelConfig
from llorch.engines import ProducerName
from llorch.engines.abilities import cannot_judge
from llorch.errors import LeftOut, MissingExtra
from llorch.files import Weights, open_weights
from llorch.files.residency import Residency
from llorch.model import Model, load
from llorch.numerics import EXACT, GGML, Numerics
from llorch.verify.expectations.files import undecoded
from llorch.verify.expectations.quantised import CHECKPOINT, block_rows, model_rows
from llorch.verify.expectations.quantised_models import MODELS
from llorch.verify.goldens import N_GREEDY, n_greedy_for, unable_of
from llorch.verify.judge import Comparison
from llorch.verify.models import unable_for, verify_as_stored, verify_live, verify_stored
from llorch.verify.runners.numpy import emulated
from llorch.verify.training.claims import verify_training_stored
from llorch.verify.training.goldens import MODELS as TRAINED

if TYPE_CHECKING:
    from llorch.cli.on_torch import TorchBackend
    from llorch.pytorch.device import Kernels
    from llorch.pytorch.distributed.launch import DeviceMesh

_PACKAGES = {"llamacpp": ("llama_cpp",), "transformers": ("torch", "transformers")}

VERSION = 1  # of what --json gives; a change that a reader would trip over makes it the next one
QUANTISED = "quantised"  # stands for the micro models of checkpoint 13
AT_ONCE = 4  # of the micro models of checkpoint 13: one job
MIN_DISTINCT = 8  # fewer distinct tokens hide some mistakes

Say = Callable[[str], None]


@dataclass(frozen=True)
class ClaimedArithmetic:
    """What the user says of the arithmetic."""

    numerics: str | None  # None takes ggml for a file that llama.cpp rounds inputs for, else exact
    kv_cache: str  # its type, with ggml numerics
    residency: Residency  # where matrices lie, with ggml numerics
    backend: str = "numpy"  # or torch, whose device, dtype and kernels follow
    device: str | None = None
    dtype: str | None = None
    kernels: "Kernels" = "auto"
    mesh: "DeviceMesh | None" = None


@dataclass(frozen=True)
class LiveInput:
    """What live engines are given, when the user says so."""

    prompt: str | None
    tokens: list[int] | None


def judge_all(
    models: Sequence[str], against: Sequence[str], arithmetic: ClaimedArithmetic, *, prompt: str | None,
    tokens: list[int] | None, as_json: bool, strict: bool, detail: bool,
) -> int:  # fmt: skip
    """Judge models one after the other, report each as soon as it is done, and return the exit code.

    No models stand for all built-in ones; `against` is `golden` or producers, none for goldens of built-in models and
    all producers of others. `prompt` and `tokens` are for live engines.
    """
    given = LiveInput(prompt, tokens)
    on_torch, absent = _torch_backends(arithmetic)
    specs = dict.fromkeys(models or (IN_WHEEL if is_wheel() else (*EVERY, QUANTISED)))
    if arithmetic.mesh is not None:
        unsplit = _not_split(specs, arithmetic.mesh["tp"].size(), given=bool(models))
        absent = {**absent, **unsplit}
        specs = {spec: None for spec in specs if spec not in unsplit}
    plans = [(spec, *_plan(spec, against, has_input=given != LiveInput(None, None))) for spec in specs]
    threads = use_threads(*(_config(spec, path) for spec, path, _ in plans))
    out = console()
    done = [judged for backend in on_torch if (judged := _kernels(backend)).rows]
    for judged in () if as_json else done:
        print_model(out, judged, detail=detail)
    alone = bool(on_torch) or any(engines for *_, engines in plans)
    with Workers(_jobs(specs), 1 if alone else allowed_cores()) as workers:
        for spec, path, engines in plans:
            for backend in on_torch or [None]:
                with progress(f"verifying {spec}" + (f" on {backend.name}" if backend else "")) as tell:
                    if backend is not None:
                        judged = _judged_on_torch(spec, path, engines, backend, given, tell)
                    else:
                        judged = _judged(spec, path, engines, arithmetic, given, tell, workers)
                done.append(judged)
                if not as_json:
                    print_model(out, judged, detail=detail)
    if is_wheel() and not models:
        judged_here = f"this wheel verifies only {', '.join(IN_WHEEL)}, without long contexts and training"
        say(f"note: {LeftOut(judged_here)}")
    used = threads + (f"; processes: {workers.n_processes}" if workers.n_processes > 1 else "")
    return reported(done, absent, used, strict=strict, as_json=as_json)


def reported(done: Sequence[JudgedModel], absent: Mapping[str, str], used: str, *, strict: bool, as_json: bool) -> int:
    """Close the report, or print all of it as JSON; the exit code."""
    counts = summary(done, absent, strict=strict)
    if as_json:
        rows = [row.record() for judged in done for row in judged.rows]
        click.echo(to_json({"version": VERSION, "rows": rows, "summary": counts}))
    else:
        out = console()
        out.print(used)
        print_end(out, done, absent, counts)
    return _exit_code(counts)


def _torch_backends(arithmetic: ClaimedArithmetic) -> "tuple[Sequence[TorchBackend], Mapping[str, str]]":
    """List the targets on the torch path, none for NumPy, and those that are left out, with the reason."""
    refuse_scheme(arithmetic)
    if arithmetic.backend == "numpy":
        if arithmetic.device or arithmetic.dtype or arithmetic.kernels != "auto":
            raise click.UsageError(
                "--device, --dtype and --kernels go with --backend torch; NumPy runs on the CPU in float32"
            )
        return [], {}
    if arithmetic.numerics == "ggml" or arithmetic.kv_cache != "f32":
        raise click.UsageError(
            "--numerics ggml goes with --backend numpy; the torch path always computes in exact numerics"
        )
    refuse_residency(arithmetic)
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    from llorch.cli.on_torch import backends_not_run, torch_backends

    backends = torch_backends(arithmetic.device, arithmetic.dtype, arithmetic.kernels, arithmetic.mesh)
    return backends, backends_not_run(backends)


def _not_split(specs: Iterable[str], n_ranks: int, *, given: bool) -> dict[str, str]:
    """List the models that a mesh leaves out, and why; ValueError for one that the user named."""
    from llorch.pytorch.distributed.sharding_plan import cannot_split

    reasons: dict[str, str] = {}
    for spec in specs:
        packed = spec == QUANTISED and not Path(spec).exists()
        reason = "packed matrices" if packed else cannot_split(_config(spec, model_path(spec)), n_ranks)
        if reason and given:
            raise ValueError(f"{spec}: --mesh tp={n_ranks}: {reason}")
        reasons |= {spec: reason} if reason else {}
    return reasons


def _kernels(backend: "TorchBackend") -> JudgedModel:
    """Report the check of llorch's kernels; without rows if none were asked for."""
    return JudgedModel(KERNELS, list(backend.kernels()), checkpoints=("14",), backend=backend.name)


def _jobs(specs: Iterable[str]) -> dict[tuple[str, int], Callable[[], list[Comparison]]]:
    """Split the judging of built-in models on NumPy into independent parts."""
    parts = {(spec, at): part for spec in specs for at, part in enumerate(_parts(spec))}
    return {name: lambda part=part: list(part()) for name, part in parts.items()}


def _parts(spec: str) -> Sequence[Callable[[], Iterator[Comparison]]]:
    if spec == QUANTISED:
        names = tuple(MODELS)
        parts = (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))
        return [block_rows, *(partial(model_rows, part) for part in parts)]
    return [partial(verify_stored, spec), *([partial(verify_training_stored, spec)] if _is_trained(spec) else [])]


def _judged(
    spec: str,
    path: Path,
    engines: Sequence[ProducerName],
    arithmetic: ClaimedArithmetic,
    given: LiveInput,
    tell: Say,
    workers: Workers,
) -> JudgedModel:
    if not engines:
        if arithmetic.numerics == "ggml" or arithmetic.kv_cache != "f32":
            raise click.UsageError(
                f"{spec}: the goldens hold exact numerics; for other numerics, add --against llamacpp"
            )
        return _stored(spec, workers)
    if (numerics := _numerics(path, engines, arithmetic)) == EXACT:
        refuse_residency(arithmetic)
        return _live(path, engines, given, tell, verify_live)
    return _as_stored(path, numerics, arithmetic.residency, given, tell)


def _judged_on_torch(
    spec: str, path: Path, engines: Sequence[ProducerName], backend: "TorchBackend", given: LiveInput, tell: Say
) -> JudgedModel:
    if engines:
        judged = _live(path, engines, given, tell, backend.live)
    elif spec == QUANTISED:
        judged = _from_goldens(spec, backend.quantised)
        judged = replace(judged, numerics="packed matrices; inputs rounded as ggml does", checkpoints=(CHECKPOINT,))
    else:
        trained = _is_trained(spec) and backend.trains
        judged = _from_goldens(spec, lambda: chain(backend.stored(spec), backend.training(spec) if trained else ()))
        judged = replace(judged, checkpoints=(*_forward(spec), *(TRAINING if trained else ())))
    return replace(judged, backend=backend.name)


def _plan(spec: str, against: Sequence[str], *, has_input: bool) -> tuple[Path, tuple[ProducerName, ...]]:
    """Choose the path of a model and the engines to run; no engine means stored goldens."""
    stored = spec in (*EVERY, QUANTISED) and not Path(spec).exists()
    path = Path(spec) if stored and spec == QUANTISED else model_path(spec)
    if "golden" in against and not stored:
        raise click.UsageError(f"{spec}: only built-in models have goldens; use --against llamacpp or transformers")
    if stored and not set(against) - {"golden"}:
        if has_input:
            raise click.UsageError(
                f"{spec}: goldens belong to a fixed input; add --against llamacpp to run another input"
            )
        return path, ()
    return path, tuple(p for p in get_args(ProducerName) if not against or p in against)


def _config(spec: str, path: Path) -> ModelConfig:
    """Of a model, or of the micro models of checkpoint 13, which are all of one size."""
    micro = spec == QUANTISED and not path.exists()
    return next(iter(MODELS.values())).config if micro else open_weights(path).config


def _stored(name: str, workers: Workers[list[Comparison]]) -> JudgedModel:
    judged = _from_goldens(name, lambda: chain(*(workers.result(job) for job in workers.jobs if job[0] == name)))
    if name == QUANTISED:
        arithmetic = f"numerics {GGML}; {len(MODELS)} micro models, one for each type, in a temporary folder"
        return replace(judged, numerics=arithmetic, checkpoints=(CHECKPOINT,))
    return replace(judged, checkpoints=(*_forward(name), *(TRAINING if _is_trained(name) else ())))


def _is_trained(name: str) -> bool:
    """Tell whether there are goldens of training: a wheel has none."""
    return name in TRAINED and not is_wheel()


def _forward(name: str) -> Sequence[str]:
    return checkpoints_of(open_weights(builtin_path(name)).config)


def _from_goldens(name: str, verify: Callable[[], Iterator[Comparison]]) -> JudgedModel:
    try:
        unable = {} if name == QUANTISED else unable_of(goldens_folder() / name)
        return JudgedModel(name, list(verify()), cannot_judge=unable)
    except FileNotFoundError as error:
        return JudgedModel(name, [], [str(error)])


def _live(
    path: Path,
    engines: Sequence[ProducerName],
    given: LiveInput,
    tell: Say,
    verify: Callable[..., Iterator[Comparison]],
) -> JudgedModel:
    model = Model(open_weights(path))
    ids, text = _checked_input(model, given)
    absent = {engine: missing for engine in engines if (missing := _missing_package(engine)) is not None}
    unable = unable_for(engines, model.config, ids, n_greedy_for(model.config, len(ids)))
    usable: list[ProducerName] = [engine for engine in engines if engine not in absent | unable]
    failed: dict[str, str] = {}
    rows = list(verify(path, ids, usable, text=text, say=tell, failed=failed)) if usable else []
    reasons = {engine: str(MissingExtra("golden", package)) for engine, package in absent.items()} | failed
    unable |= undecoded(model.weights)
    checkpoints = checkpoints_of(model.config, quantised=any(row.checkpoint == "13" for row in rows))
    return JudgedModel(model.name, rows, _reasons(reasons), checkpoints=checkpoints, cannot_judge=unable)


def _reasons(of_engines: Mapping[str, str]) -> list[str]:
    return [f"{engine}: {reason.removeprefix(f'{engine}: ')}" for engine, reason in of_engines.items()]


def _numerics(path: Path, engines: Sequence[ProducerName], wanted: ClaimedArithmetic) -> Numerics:
    """Choose the arithmetic that the user asks for, or else the one that suits the file."""
    if wanted.numerics == "ggml" and (path.is_dir() or "llamacpp" not in engines):
        raise click.UsageError(
            f"{path}: --numerics ggml needs a .gguf file and --against llamacpp; llorch convert writes such a file"
        )
    rounded = wanted.numerics is None and path.is_file() and "llamacpp" in engines
    default = GGML if rounded and _suits_ggml(open_weights(path)) else EXACT
    return chosen_numerics(wanted.numerics or default.name, wanted.kv_cache)


def _suits_ggml(weights: Weights) -> bool:
    """Whether llama.cpp rounds inputs for a file, and computes the model that it holds."""
    config = weights.config
    return bool(emulated(weights.using(GGML))) and not cannot_judge("llamacpp", config, config.max_position_embeddings)


def refuse_scheme(wanted: ClaimedArithmetic) -> None:
    """No engine that `verify` runs computes a scheme, and no tolerance is derived for it."""
    if wanted.numerics == "scheme":
        raise click.UsageError(
            "--numerics scheme goes with run, chat, serve and quality; verify judges exact and ggml numerics"
        )


def refuse_residency(wanted: ClaimedArithmetic) -> None:
    """`--weights` says nothing where all are decoded."""
    if wanted.residency != "auto":
        raise click.UsageError("--weights goes with --numerics ggml; exact numerics decode all weights")


def _as_stored(path: Path, numerics: Numerics, residency: Residency, given: LiveInput, tell: Say) -> JudgedModel:
    ids, text = _checked_input(Model(open_weights(path)), given)
    model = load(path, numerics=numerics, residency=residency, n_tokens=len(ids) + N_GREEDY)
    arithmetic = f"numerics {numerics}; {emulated(model.weights)}"
    checkpoints = checkpoints_of(model.config, quantised=True)
    if (missing := _missing_package("llamacpp")) is not None:
        return JudgedModel(model.name, [], [f"llamacpp: {MissingExtra('golden', missing)}"], arithmetic, checkpoints)
    say_plan(model)
    failed: dict[str, str] = {}
    rows = list(verify_as_stored(model, ids, text=text, say=tell, failed=failed))
    return JudgedModel(model.name, rows, _reasons(failed), arithmetic, checkpoints)


def _checked_input(model: Model, given: LiveInput) -> tuple[list[int], str | None]:
    ids, text = choose_ids(model, given.prompt, given.tokens)
    context = model.config.max_position_embeddings
    if len(ids) > context:  # before the engines work on it for minutes
        raise ValueError(
            f"verify: {len(ids)} tokens do not fit the context of {context}; give fewer --tokens or a shorter --prompt"
        )
    if len(set(ids)) < MIN_DISTINCT:
        say(f"warning: {len(set(ids))} distinct tokens; some mistakes show only with {MIN_DISTINCT} or more")
    return ids, text


def _missing_package(engine: str) -> str | None:
    return next((package for package in _PACKAGES[engine] if find_spec(package) is None), None)


def _exit_code(counts: Mapping) -> int:
    if counts["failed"] or (counts["strict"] and counts["ties"]):
        return DIFFERS
    return MISSING if counts["not_run"] or counts["checkpoints_not_run"] else OK
