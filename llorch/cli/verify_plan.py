"""Work of `llorch verify`: compare each model, stage by stage, with stored goldens or live engines, and report.

A stage is a named intermediate tensor; a golden is a reference engine's output for it, stored for a fixed input. A
checkpoint is a numbered validation point, a group of stages (no weights file). Numerics: exact, or rounding inputs as
ggml does. Built-in models are compared with goldens, other models with engines that run now.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, get_args

import click

from llorch.cli.inputs import choose_ids, chosen_numerics, model_path, say_plan
from llorch.cli.model_options import ModelOptions
from llorch.cli.outcome import DIFFERS, MISSING, OK
from llorch.cli.output import progress, say, to_json
from llorch.cli.report import print_brief_end, print_end, print_line, print_model
from llorch.cli.tables import console
from llorch.cli.threads import allowed_cores, use_threads
from llorch.cli.verify_summary import KERNELS, NOT_COMPARED, TRAINING, ModelReport, checkpoints_of, summary
from llorch.cli.workers import Workers
from llorch.engines import EngineName
from llorch.engines.interface import unsupported_reason
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.residency import Residency
from llorch.judging.expectations.files import missing_library
from llorch.judging.expectations.quantised import CHECKPOINT, block_rows, model_rows
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.expectations.training import verify_training_stored
from llorch.judging.goldens.forward import N_GREEDY, read_unsupported
from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.judging.runners.numpy import describe_rounding
from llorch.judging.types import Comparison
from llorch.judging.verify import plan_live, verify_ggml, verify_live, verify_stored
from llorch.model.model import Model, load
from llorch.ops.compiled.ggml import NoKernels, why_absent
from llorch.ops.numerics import EXACT, GGML, Numerics
from llorch.runtime.builtin import EVERY, GOLDENS_IN_WHEEL, goldens_folder, is_wheel
from llorch.runtime.errors import MissingExtra, NotInWheel, UserError
from llorch.runtime.memory import available_memory

if TYPE_CHECKING:
    from llorch.cli.on_torch import TorchBackend
    from llorch.pytorch.distributed.launch import DeviceMesh

_PACKAGES = {"llamacpp": ("llama_cpp",), "transformers": ("torch", "transformers")}

VERSION = 2  # of the --json output; a change that breaks readers increments it
QUANTISED = "quantised"  # name for the micro models of checkpoint 13: small models, one for each quantised type
JOB_BYTES = 2e9  # largest memory of a process: attention to a long context in float64
AT_ONCE = 4  # number of these micro models in one job
MIN_DISTINCT = 8  # fewer distinct tokens hide some mistakes, so llorch warns

Report = Callable[[str], None]  # shows a line of progress
TimedRows = tuple[list[Comparison], float]  # the comparisons of a job, and its seconds
JobName = tuple[str, str | None, int]  # model, torch backend (None: NumPy), index of the part


@dataclass(frozen=True)
class LiveInput:
    """Input of the live engines, if the user gave one."""

    prompt: str | None
    tokens: list[int] | None


@dataclass(frozen=True)
class ModelPlan:
    """Model to judge, resolved once, before anything runs; see `_plan`."""

    spec: str  # the model, as the user typed it
    engines: tuple[EngineName, ...]  # to run; empty: stored goldens judge the model
    weights: Weights | None  # None: the micro models of checkpoint 13
    numerics: Numerics = EXACT

    @property
    def config(self) -> ModelConfig:
        """The configuration of the model; the micro models of checkpoint 13 are all of one size."""
        return next(iter(MODELS.values())).config if self.weights is None else self.weights.config

    def trains_on(self, backend: "TorchBackend | None") -> bool:
        """Tell if the model has goldens of training for a backend (None: NumPy); an installed wheel contains none."""
        return self.spec in TRAINED and not is_wheel() and (backend is None or backend.trains)


def judge_all(
    models: Sequence[str], against: Sequence[str], options: ModelOptions, inputs: LiveInput,
    mesh: "DeviceMesh | None", *, as_json: bool, strict: bool, detail: bool, verbose: bool,
) -> int:  # fmt: skip
    """Judge models one after the other, report each as soon as it is done, and return the exit code.

    Without models, judge all built-in ones: one line each, and a table with `verbose` or `detail`. `against` is
    `golden` or names of engines; by default, goldens for built-in models and all engines for others.
    """
    on_torch, absent = _torch_backends(options, mesh)
    by_ggml = options.kernels == "ggml"
    specs, not_split = _choose_specs(models or ([QUANTISED] if by_ggml else []), mesh)
    absent = {**absent, **not_split}
    plans = [_plan(spec, against, options, has_input=inputs != LiveInput(None, None)) for spec in specs]
    threads = use_threads(*(plan.config for plan in plans))
    out, reports = console(), []
    is_brief = not (models or verbose or detail or as_json)
    is_serial = any(plan.engines for plan in plans) or not all(backend.forks for backend in on_torch)
    n_processes = 1 if is_serial else int(min(allowed_cores(), max(1, available_memory() / JOB_BYTES)))
    with Workers(_verify_jobs(plans, on_torch), n_processes) as workers:
        for report in _judge_plans(plans, on_torch, options.residency, inputs, workers):
            reports.append(report)
            if is_brief:
                print_line(out, report, max(map(len, (KERNELS, *specs))))
            elif not as_json:
                print_model(out, report, detail=detail)
    if is_wheel() and not models:
        scope = f"this wheel verifies only {', '.join(GOLDENS_IN_WHEEL)}, without long contexts and training"
        say(f"note: {NotInWheel(scope)}")
    threads_line = threads + (f"; processes: {workers.n_processes}" if workers.n_processes > 1 else "")
    return end_report(reports, absent, threads_line, strict=strict, as_json=as_json, is_brief=is_brief)


def judge_model(spec: str, options: ModelOptions, inputs: LiveInput) -> ModelReport:
    """Judge one model on the NumPy path against all engines, in the arithmetic of its file."""
    plan = _plan(spec, get_args(EngineName), options, has_input=inputs != LiveInput(None, None))
    use_threads(plan.config)
    with progress(f"verifying {spec}") as report_step:
        return _judge_on_numpy(plan, options.residency, inputs, report_step)


def _judge_plans(
    plans: Sequence[ModelPlan], on_torch: "Sequence[TorchBackend]", residency: Residency, inputs: LiveInput,
    workers: Workers[TimedRows],
) -> Iterator[ModelReport]:  # fmt: skip
    """Judge the kernels of each backend, then each model on each backend; show progress."""
    for backend in on_torch:
        start = perf_counter()
        if comparisons := list(backend.kernels()):  # none unless --kernels own
            seconds = perf_counter() - start
            yield ModelReport(KERNELS, comparisons, checkpoints=("14",), backend=backend.name, seconds=seconds)
    for plan in plans:
        for backend in on_torch or [None]:
            start = perf_counter()
            with progress(f"verifying {plan.spec}" + (f" on {backend.name}" if backend else "")) as tell:
                if not plan.engines:
                    report = _judge_by_goldens(plan, backend, workers)
                elif backend is None:
                    report = _judge_on_numpy(plan, residency, inputs, tell)
                else:
                    report = _judge_by_engines(plan, inputs, tell, backend.live)
                    report = replace(report, seconds=perf_counter() - start)
            notes = [] if plan.weights is None else plan.weights.notes_on_left_out(NOT_COMPARED)
            name = "" if backend is None else backend.name
            yield replace(report, backend=name, is_users=not _is_builtin(plan.spec), notes=notes)


def end_report(
    reports: Sequence[ModelReport], absent: Mapping[str, str], threads_line: str, *, strict: bool, as_json: bool,
    is_brief: bool = False,
) -> int:  # fmt: skip
    """Print the end of the report, or all of it as JSON, and return the exit code; `absent`: backends not run, why."""
    counts = summary(reports, absent, strict=strict)
    if as_json:
        rows = [comparison.record() for report in reports for comparison in report.comparisons]
        click.echo(to_json({"version": VERSION, "comparisons": rows, "summary": counts}))
    elif is_brief:
        print_brief_end(console(), reports, absent, counts)
    else:
        out = console()
        out.print(threads_line)
        print_end(out, reports, absent, counts)
    return _exit_code(counts)


def _torch_backends(
    options: ModelOptions, mesh: "DeviceMesh | None"
) -> "tuple[Sequence[TorchBackend], Mapping[str, str]]":
    """List the torch targets, none for NumPy, and the backends that do not run, with reasons."""
    refuse_scheme(options)
    if options.backend == "numpy":
        if options.device or options.dtype or options.kernels not in ("auto", "ggml"):
            raise click.UsageError(
                "--device, --dtype and --kernels go with --backend torch; NumPy runs on the CPU in float32"
            )
        return [], {}
    if options.numerics == "ggml" or options.kv_cache != "f32":
        raise click.UsageError(
            "--numerics ggml goes with --backend numpy; the torch path always computes in exact numerics"
        )
    if options.kernels == "ggml":
        raise click.UsageError("--kernels ggml goes with --backend numpy; the torch path has no kernels of ggml")
    refuse_residency(options)
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    from llorch.cli.on_torch import backends_not_run, torch_backends

    backends = torch_backends(options.device, options.dtype, options.torch_kernels, mesh)
    return backends, backends_not_run(backends)


def _choose_specs(models: Sequence[str], mesh: "DeviceMesh | None") -> tuple[list[str], dict[str, str]]:
    """List the models to judge, and reasons for those that a mesh cannot split; UserError if the user named one."""
    specs = list(dict.fromkeys(models or (GOLDENS_IN_WHEEL if is_wheel() else (*EVERY, QUANTISED))))
    if mesh is None:
        return specs, {}
    from llorch.pytorch.distributed.sharding_plan import cannot_split

    n_ranks = mesh["tp"].size()
    reasons: dict[str, str] = {}
    for spec in specs:
        is_packed = spec == QUANTISED and _is_builtin(spec)
        reason = "packed matrices" if is_packed else cannot_split(open_weights(model_path(spec)).config, n_ranks)
        if reason and models:
            raise UserError(f"{spec}: --mesh tp={n_ranks}: {reason}")
        reasons |= {spec: reason} if reason else {}
    return [spec for spec in specs if spec not in reasons], reasons


def _verify_jobs(
    plans: Iterable[ModelPlan], on_torch: "Sequence[TorchBackend]"
) -> dict[JobName, Callable[[], TimedRows]]:
    """Split the judging of built-in models into independent parts, for each backend."""
    pairs = ((plan, backend) for plan in plans if not plan.engines for backend in on_torch or [None])
    return {
        (plan.spec, backend and backend.name, index): partial(_time_part, part)
        for plan, backend in pairs
        for index, part in enumerate(_stored_checks(plan, backend))
    }


def _time_part(part: Callable[[], Iterable[Comparison]]) -> TimedRows:
    """Collect the comparisons of a part, and the seconds that the process needed for them."""
    start = perf_counter()
    return list(part()), perf_counter() - start


def _stored_checks(plan: ModelPlan, backend: "TorchBackend | None") -> Sequence[Callable[[], Iterator[Comparison]]]:
    """List the calls that compare a model with stored goldens; without weights, those of the micro models."""
    if plan.weights is None:
        names = tuple(MODELS)
        parts = (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))
        if backend is None and plan.numerics.kernels == "ggml":
            return [] if why_absent() else [partial(model_rows, part, "ggml") for part in parts]
        return [backend.quantised] if backend else [block_rows, *(partial(model_rows, part) for part in parts)]
    forward, training = (backend.stored, backend.training) if backend else (verify_stored, verify_training_stored)
    return [partial(forward, plan.spec), *([partial(training, plan.spec)] if plan.trains_on(backend) else [])]


def _judge_on_numpy(plan: ModelPlan, residency: Residency, inputs: LiveInput, report_step: Report) -> ModelReport:
    """Judge a model on the NumPy path: by engines in exact numerics, or by llama.cpp in ggml numerics."""
    if plan.numerics == EXACT:
        return _judge_by_engines(plan, inputs, report_step, verify_live)
    return _judge_ggml(plan, residency, inputs, report_step)


def _plan(spec: str, against: Sequence[str], options: ModelOptions, *, has_input: bool) -> ModelPlan:
    """Choose the engines that judge a model, and its numerics; no engine means stored goldens."""
    is_builtin = _is_builtin(spec)
    if "golden" in against and not is_builtin:
        raise click.UsageError(f"{spec}: only built-in models have goldens; use --against llamacpp or transformers")
    weights = None if is_builtin and spec == QUANTISED else open_weights(model_path(spec))
    if is_builtin and not set(against) - {"golden"}:
        if has_input:
            raise click.UsageError(
                f"{spec}: goldens belong to a fixed input; add --against llamacpp to run another input"
            )
        by_ggml = options.kernels == "ggml"
        if spec == QUANTISED and options.kv_cache == "f32":
            return ModelPlan(spec, (), None, chosen_numerics(options.numerics, "f32", "ggml") if by_ggml else GGML)
        if options.numerics == "ggml" or options.kv_cache != "f32" or by_ggml:
            raise click.UsageError(
                f"{spec}: the goldens hold exact numerics; for other numerics, add --against llamacpp"
            )
        return ModelPlan(spec, (), weights)
    if weights is None:
        raise click.UsageError(f"{spec}: the micro models of checkpoint 13 have goldens only; leave out --against")
    engines = tuple(engine for engine in get_args(EngineName) if not against or engine in against)
    if options.backend == "torch":
        return ModelPlan(spec, engines, weights)
    numerics = _choose_numerics(weights, engines, options)
    if numerics == EXACT:
        refuse_residency(options)
    return ModelPlan(spec, engines, weights, numerics)


def _is_builtin(spec: str) -> bool:
    """Tell if a word names a model with goldens in llorch, and no file of the same name exists."""
    return spec in (*EVERY, QUANTISED) and not Path(spec).exists()


def _judge_by_goldens(plan: ModelPlan, backend: "TorchBackend | None", workers: Workers[TimedRows]) -> ModelReport:
    """Collect the comparisons of a built-in model with its goldens, from the worker processes that computed them."""
    jobs = [job for job in workers.jobs if job[:2] == (plan.spec, backend and backend.name)]
    times: list[float] = []

    def collect_rows() -> Iterator[Comparison]:
        for job in jobs:
            comparisons, seconds = workers.result(job)
            times.append(seconds)
            yield from comparisons

    report = replace(_collect_report(plan.spec, collect_rows), seconds=sum(times))
    if plan.weights is None:
        if not jobs:
            return _without_kernels(plan, why_absent(), (CHECKPOINT,))
        files = f"{len(MODELS)} micro models, one for each type, in a temporary folder"
        arithmetic = (
            "packed matrices; inputs rounded as ggml does" if backend else _describe_arithmetic(plan.numerics, files)
        )
        return replace(report, numerics=arithmetic, checkpoints=(CHECKPOINT,))
    training = TRAINING if plan.trains_on(backend) else ()
    return replace(report, checkpoints=(*checkpoints_of(plan.config), *training))


def _collect_report(name: str, verify: Callable[[], Iterator[Comparison]]) -> ModelReport:
    """Collect the comparisons of one model; a missing golden file becomes a reason for the verdict NOT RUN."""
    try:
        unsupported = {} if name == QUANTISED else read_unsupported(goldens_folder() / name)
        return ModelReport(name, list(verify()), unsupported_reason=unsupported)
    except FileNotFoundError as error:
        return ModelReport(name, [], [str(error)])


def _judge_by_engines(
    plan: ModelPlan, inputs: LiveInput, report_step: Report, verify: Callable[..., Iterator[Comparison]]
) -> ModelReport:
    """Run the engines of a plan on its input, and compare every stage with each of them; list those that cannot."""
    assert plan.weights is not None
    ids, text = _choose_input(Model(plan.weights), inputs)
    run = plan_live(plan.weights, ids, plan.engines, text=text)
    absent = {engine: missing for engine in plan.engines if (missing := _missing_package(engine)) is not None}
    usable = [engine for engine in plan.engines if engine not in absent and engine not in run.unsupported]
    failed: dict[str, str] = {}
    comparisons = list(verify(replace(run, engines=usable), progress=report_step, failed=failed)) if usable else []
    reasons = {engine: str(MissingExtra("golden", package)) for engine, package in absent.items()} | failed
    checkpoints = checkpoints_of(plan.config, quantised=any(c.stage_ref.checkpoint == "13" for c in comparisons))
    unsupported = {**run.unsupported, **missing_library(plan.weights)}
    return ModelReport(
        run.name, comparisons, _format_reasons(reasons), checkpoints=checkpoints, unsupported_reason=unsupported
    )


def _format_reasons(reasons: Mapping[str, str]) -> list[str]:
    return [f"{engine}: {reason.removeprefix(f'{engine}: ')}" for engine, reason in reasons.items()]


def _choose_numerics(weights: Weights, engines: Sequence[EngineName], options: ModelOptions) -> Numerics:
    """Choose the arithmetic: the user's, else the one that suits the file."""
    by_ggml = options.kernels == "ggml"
    if (options.numerics == "ggml" or by_ggml) and (weights.path.is_dir() or "llamacpp" not in engines):
        raise click.UsageError(
            f"{weights.path}: --{'kernels' if by_ggml else 'numerics'} ggml needs a .gguf file and --against llamacpp; "
            "llorch convert writes such a file"
        )
    if by_ggml:
        return chosen_numerics(options.numerics, options.kv_cache, "ggml")
    may_round = options.numerics is None and weights.path.is_file() and "llamacpp" in engines
    default = GGML if may_round and _suits_ggml(weights) else EXACT
    return chosen_numerics(options.numerics or default.name, options.kv_cache)


def _suits_ggml(weights: Weights) -> bool:
    """Tell if llama.cpp rounds inputs for the matrices of a file, and can compute its model."""
    config = weights.config
    return bool(describe_rounding(weights.using(GGML))) and not unsupported_reason(
        "llamacpp", config, config.max_position_embeddings
    )


def refuse_scheme(options: ModelOptions) -> None:
    """Refuse scheme numerics, which round activations as a quantised folder says: no engine of `verify` does that."""
    if options.numerics == "scheme":
        raise click.UsageError(
            "--numerics scheme goes with run, chat, serve and quality; verify judges exact and ggml numerics"
        )


def refuse_residency(options: ModelOptions) -> None:
    """Refuse the option `--weights` (residency) in exact numerics, where all matrices are decoded."""
    if options.residency != "auto":
        raise click.UsageError("--weights goes with --numerics ggml; exact numerics decode all weights")


def _judge_ggml(plan: ModelPlan, residency: Residency, inputs: LiveInput, report_step: Report) -> ModelReport:
    """Judge a GGUF file in its quantised arithmetic against llama.cpp, which runs the file as it is."""
    assert plan.weights is not None
    ids, text = _choose_input(Model(plan.weights), inputs)
    checkpoints = checkpoints_of(plan.config, quantised=True)
    try:
        model = load(plan.weights.path, numerics=plan.numerics, residency=residency, n_tokens=len(ids) + N_GREEDY)
    except NoKernels as error:
        return _without_kernels(plan, str(error), checkpoints)
    arithmetic = _describe_arithmetic(plan.numerics, describe_rounding(model.weights))
    if (missing := _missing_package("llamacpp")) is not None:
        return ModelReport(model.name, [], [f"llamacpp: {MissingExtra('golden', missing)}"], arithmetic, checkpoints)
    say_plan(model)
    failures: dict[str, str] = {}
    comparisons = list(verify_ggml(model, ids, text=text, progress=report_step, failed=failures))
    return ModelReport(model.name, comparisons, _format_reasons(failures), arithmetic, checkpoints)


def _describe_arithmetic(numerics: Numerics, details: str) -> str:
    """Describe the arithmetic of a report."""
    own_form = "; products also compared with llorch's own form" if numerics.kernels == "ggml" else ""
    return f"numerics {numerics}; {details}{own_form}"


def _without_kernels(plan: ModelPlan, reason: str, checkpoints: Sequence[str]) -> ModelReport:
    """Report the verdict NOT RUN for a model that kernels of ggml should compute, which cannot be used."""
    return ModelReport(plan.spec, [], [f"ggml's kernels: {reason}"], f"numerics {plan.numerics}", checkpoints)


def _choose_input(model: Model, inputs: LiveInput) -> tuple[list[int], str | None]:
    """Choose ids and text, see `choose_ids`; UserError if they exceed the context, a warning if few are distinct."""
    ids, text = choose_ids(model, inputs.prompt, inputs.tokens)
    context = model.config.max_position_embeddings
    if len(ids) > context:  # checked first, because the engines need minutes
        raise UserError(
            f"verify: {len(ids)} tokens do not fit the context of {context}; give fewer --tokens or a shorter --prompt"
        )
    if len(set(ids)) < MIN_DISTINCT:
        say(f"warning: {len(set(ids))} distinct tokens; some mistakes show only with {MIN_DISTINCT} or more")
    return ids, text


def _missing_package(engine: str) -> str | None:
    """Return the first module, as `llama_cpp`, that an engine needs and that is not installed, or None."""
    return next((package for package in _PACKAGES[engine] if find_spec(package) is None), None)


def _exit_code(counts: Mapping) -> int:
    if counts["failed"] or (counts["strict"] and counts["ties"]):
        return DIFFERS
    return MISSING if counts["not_run"] or counts["checkpoints_not_run"] else OK
