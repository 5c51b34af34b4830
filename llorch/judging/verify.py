"""A model judged from end to end: a built-in one by its stored goldens, any by engines that run now.

A caller says which runners of llorch are judged; all get the same goldens, float64 reference and tolerances.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llorch.engines import EngineName, LoadPath, Progress, open_engine
from llorch.engines.interface import unsupported_reason
from llorch.engines.process import start
from llorch.families.config import ModelConfig
from llorch.files import Weights, open_weights
from llorch.files.layerwise import largest_part
from llorch.files.quantised import QuantisedFolder
from llorch.files.residency import plan as plan_residency
from llorch.judging.expectations.files import (
    decode_rows,
    foreign_tensors,
    foundation_rows,
    matrix_rows,
    own_tensors,
    token_rows,
)
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.long_contexts import LongSuite
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE, require_numbers, run_reference
from llorch.judging.goldens.forward import (
    ENGINES,
    N_GREEDY,
    EngineOutput,
    Golden,
    ReferenceOutput,
    TokenCheck,
    cases_for,
    n_greedy_for,
    note_failure,
    read,
    require_weights,
    run_cases,
)
from llorch.judging.goldens.long_contexts import long_cases, read_long
from llorch.judging.runner_check import check_runner
from llorch.judging.runners import Runner
from llorch.judging.runners.numpy import GgmlRunner, numpy_runners
from llorch.judging.runners.shared import SharedWeights
from llorch.judging.types import Comparison
from llorch.model.model import Model
from llorch.runtime.builtin import goldens_folder, is_wheel
from llorch.runtime.errors import UserError
from llorch.runtime.memory import available_memory
from llorch.stages.stage_ref import Pass
from llorch.stages.table import keys

Runners = Callable[..., Iterable[Runner]]  # of weights, and whether there is a float64 reference: wide=


@dataclass(frozen=True)
class LiveOutput:
    """Outputs of reference engines that ran now on a file."""

    weights: Weights
    engine_outputs: Mapping[str, EngineOutput]  # by engine; those that could not run the model are absent
    reference: ReferenceOutput | None  # None where transformers cannot run the model
    texts: Sequence[TokenCheck]  # the prompt, with the ids that each of their tokenizers gives


def verify_stored(
    name: str, runners: Runners = numpy_runners, *, backend: str = "numpy", long: bool = True
) -> Iterator[Comparison]:
    """Judge a built-in model against its stored goldens, checkpoint 00 first; the file is judged as `backend`.

    `long`: judge long contexts, too; a wheel has no goldens of these.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: The goldens were made for other weights.
        CheckpointMismatch: What ran is not the model, or not where it was to run.
    """
    weights, golden = stored(name)
    yield from foundation_rows(name, own_tensors(weights.source), golden.tensors, backend=backend)
    yield from token_rows(name, Model(weights).tokenizer.encode, golden.tokens, backend=backend)
    suite = ForwardExpectations(name, weights, golden.cases, golden.engine_outputs, golden.reference)
    load_path = golden.reference.engine_output.load_path
    long_suite = stored_long(name, weights, load_path) if long and not is_wheel() else None
    for runner in runners(weights, wide=True):
        yield from check_runner(suite, runner)
        yield from long_suite.comparisons(runner) if long_suite else ()


def stored_long(name: str, weights: Weights, load_path: LoadPath | None = None) -> LongSuite:
    """Open the goldens of long contexts of a built-in model; for the exceptions see `verify_stored`."""
    golden = read_long(goldens_folder() / name)
    require_weights(name, golden.weights_sha256)
    if golden.cases.keys() != long_cases(weights.config).keys():
        raise UserError(f"golden {name}: expected the cases {', '.join(long_cases(weights.config))} of long contexts, "
                         f"got {', '.join(golden.cases)}; run reference_outputs/regenerate.py")  # fmt: skip
    return LongSuite(name, weights, golden, load_path)


def stored(name: str) -> tuple[Weights, Golden]:
    """Open a built-in model and its goldens; for the exceptions see `verify_stored`."""
    golden = read(goldens_folder() / name)
    weights = open_weights(require_weights(name, golden.provenance["weights_sha256"]))
    unsupported = unable_for(ENGINES, weights.config, golden.cases["near"].ids, N_GREEDY)
    if golden.unsupported_reason != unsupported:
        actual = golden.unsupported_reason
        raise UserError(f"golden {name}: leaves out {actual}, expected {unsupported}; run regenerate.py")
    return weights, golden


def unable_for(engines: Iterable[str], config: ModelConfig, ids: Sequence[int], n_greedy: int) -> dict[str, str]:
    """List the engines that cannot judge a model run with this prompt, with the reasons."""
    n_tokens = len(ids) + n_greedy
    if config.temperature is not None or any(layer.chunk for layer in config.layers):  # which count from position 0
        n_tokens = max(n_tokens, int(cases_for(ids, config)["far"].positions[-1]) + 1)
    reasons = ((engine, unsupported_reason(engine, config, n_tokens)) for engine in engines)
    return {engine: reason for engine, reason in reasons if reason}


@dataclass(frozen=True)
class LivePlan:
    """The inputs of a live comparison, resolved once, before an engine runs; see `plan_live`."""

    weights: Weights
    name: str
    ids: Sequence[int]  # the prompt
    text: str | None  # of the prompt, when llorch tokenized it; the engines then tokenize it too
    cases: Mapping[str, Pass]
    n_greedy: int
    engines: Sequence[EngineName]  # to run
    unsupported: Mapping[str, str]  # engines that cannot check the model, with the reasons


def plan_live(
    weights: Weights, ids: Sequence[int], engines: Sequence[EngineName], *, text: str | None = None
) -> LivePlan:
    """Resolve the inputs of `verify_live`; `text` is the prompt's, if llorch tokenized it: its ids are compared too."""
    n_greedy = n_greedy_for(weights.config, len(ids))
    unsupported = unable_for(engines, weights.config, ids, n_greedy)
    cases = cases_for(ids, weights.config)
    return LivePlan(weights, Model(weights).name, ids, text, cases, n_greedy, engines, unsupported)


def verify_live(
    plan: LivePlan,
    runners: Runners = numpy_runners,
    *,
    backend: str = "numpy",
    progress: Progress = lambda line: None,
    failed: dict[str, str] | None = None,
) -> Iterator[Comparison]:
    """Judge any model against reference engines that run now, checkpoint 00 first; the file is judged as `backend`.

    `failed` is filled with the engines that could not run the model, and why. Without it they raise: MemoryError if the
    traces or the model would not fit, MissingExtra if an engine is not installed, RuntimeError if it failed. In any
    case CheckpointMismatch: what ran is not the model, or not where it was to run.
    """
    shown = run_engines(plan, progress=progress, failed=failed)
    if not shown.engine_outputs:
        return
    progress("reading the tensor table")
    source = shown.weights.source
    yield from foundation_rows(plan.name, own_tensors(source), foreign_tensors(plan.weights.path), backend=backend)
    if shown.texts:
        yield from token_rows(plan.name, Model(shown.weights).tokenizer.encode, shown.texts, backend=backend)
    if isinstance(source, QuantisedFolder):
        progress("decoding the matrices")
        yield from matrix_rows(plan.name, source)
    suite = ForwardExpectations(plan.name, shown.weights, plan.cases, shown.engine_outputs, shown.reference)
    for runner in runners(shown.weights, wide=shown.reference is not None):
        progress(f"comparing {runner.name}")
        yield from check_runner(suite, runner)


def run_engines(plan: LivePlan, *, progress: Progress, failed: dict[str, str] | None) -> LiveOutput:
    """Run the reference engines of a plan; for the exceptions see `verify_live`."""
    weights, config = plan.weights, plan.weights.config
    ours = plan_residency(weights, n_tokens=len(plan.ids))
    require_memory(config, len(plan.ids), n_traces=3 * len(plan.engines) + 3)  # float64 is twice as wide
    require_engines(weights, plan.engines, ours=ours.needed)
    start((*plan.engines, "transformers"))  # which computes the float64 reference
    engine_outputs: dict[str, EngineOutput] = {}
    tokens: dict[str, Sequence[int]] = {}
    for name in plan.engines:
        progress(f"running {name}")
        with note_failure(name, failed):
            engine_outputs[name], theirs = _run_engine(name, plan, _from(progress, name))
            tokens |= {name: theirs} if theirs is not None else {}
    texts = [TokenCheck(plan.text, tokens)] if plan.text is not None else []
    reference: ReferenceOutput | None = None
    if engine_outputs:
        progress(f"running {FLOAT64_REFERENCE}")
        with note_failure(FLOAT64_REFERENCE, failed):
            require_reference(weights)
            tell = _from(progress, FLOAT64_REFERENCE)
            reference = run_reference(weights.path, plan.cases, engine_outputs, n_greedy=plan.n_greedy, progress=tell)
    without_nan: dict[str, EngineOutput] = {}
    for name, output in engine_outputs.items():
        with note_failure(name, failed):
            require_numbers(name, config.family, output, reference)
            without_nan[name] = output
    if ours.residency == "packed":
        weights = SharedWeights(weights, progress)
    return LiveOutput(weights, without_nan, reference, texts)


def _run_engine(name: EngineName, plan: LivePlan, progress: Progress) -> tuple[EngineOutput, Sequence[int] | None]:
    """Run one reference engine, and tokenize the text of the plan by it."""
    _require_able(name, plan.weights.path, plan.unsupported)
    with open_engine(name, plan.weights.path, progress=progress) as engine:
        shown = run_cases(engine, plan.cases, n_greedy=plan.n_greedy)
        tokens = engine.tokenize(plan.text, add_special=True, parse_special=False) if plan.text is not None else None
        return shown, tokens


def _require_able(engine: str, path: Path, unsupported: Mapping[str, str]) -> None:
    if engine in unsupported:
        raise UserError(f"{engine}: cannot judge {path}: {unsupported[engine]}")


def _from(progress: Progress, name: str) -> Progress:
    """Make a function that tells how far an engine is."""
    return lambda place: progress(f"running {name}: {place}")


def verify_ggml(
    model: Model,
    ids: Sequence[int],
    *,
    text: str | None = None,
    progress: Progress = lambda line: None,
    failed: dict[str, str] | None = None,
) -> Iterator[Comparison]:
    """Judge a GGUF file under the model's numerics, against llama.cpp running the file as it is; see `verify_live`.

    `text` is the prompt's, if llorch tokenized it: its ids are compared too.
    """
    require_memory(model.config, len(ids) + n_greedy_for(model.config, len(ids)), n_traces=6)
    progress("running llamacpp")
    with note_failure("llamacpp", failed):
        cases, engine_output, texts = _run_as_stored(model, ids, text)
    if failed:
        return
    progress("comparing tensors")
    name, weights = model.name, model.weights
    yield from foundation_rows(name, own_tensors(weights.source), foreign_tensors(weights.path))
    if texts:
        yield from token_rows(name, model.tokenizer.encode, texts)
    yield from decode_rows(name, weights)
    progress("comparing stages")
    weights = SharedWeights(weights, progress) if weights.packed else weights
    suite = ForwardExpectations(name, weights, cases, {"llamacpp": engine_output}, None, n_prompt=len(ids))
    tolerances = {case: suite.tolerances(case) for case in cases}
    yield from check_runner(suite, GgmlRunner(weights, engine_output.traces, tolerances))


def _run_as_stored(
    model: Model, ids: Sequence[int], text: str | None
) -> tuple[Mapping[str, Pass], EngineOutput, Sequence[TokenCheck]]:
    """Run llama.cpp on a GGUF file as it is; return the inputs with its greedy text, its outputs and its token ids."""
    weights, config = model.weights, model.config
    n_greedy = n_greedy_for(config, len(ids))
    _require_able("llamacpp", weights.path, unable_for(("llamacpp",), config, ids, n_greedy))
    with open_engine("llamacpp", weights.path, numerics=weights.numerics) as engine:
        greedy = engine.greedy(ids, n_greedy)
        cases = cases_for(ids, config) | {"near": Pass((*ids, *greedy[:-1]))}
        output = replace(run_cases(engine, cases, n_greedy=1), greedy=np.asarray(greedy, np.int64))
        require_numbers("llamacpp", config.family, output, None)
        token_ids = None if text is None else engine.tokenize(text, add_special=True, parse_special=False)
        texts = [] if text is None or token_ids is None else [TokenCheck(text, {"llamacpp": token_ids})]
        return cases, output, texts


def require_memory(config: ModelConfig, n_tokens: int, *, n_traces: int) -> None:
    """Refuse a prompt whose traces do not fit the memory, before any engine runs (MemoryError).

    Attention is recorded for every pair of tokens; `n_traces` are held at once, in float32.
    """
    values = sum(math.prod(stage.shape(config, seq=n_tokens, ctx=n_tokens)) for _, stage, _ in keys(config))
    needed = 4 * values * n_traces
    what = f"verify: the traces of {n_tokens} tokens need {needed / 1e9:.1f} GB"
    _require_free(needed, what, "give a shorter prompt")


def require_engines(weights: Weights, engines: Sequence[EngineName], *, ours: float) -> None:
    """Refuse a model that does not fit beside what `ours` takes, before an engine loads it (MemoryError).

    llama.cpp maps a file, transformers holds a copy of its own, of one layer at least.
    """
    needed = ours + largest_part(weights, "float32") * ("transformers" in engines)
    what = f"{weights.path}: exact numerics need at least one layer in float32 in every engine"
    advice = "use --numerics ggml, or --against llamacpp alone"
    _require_free(needed, f"{what}, about {needed / 1e9:.1f} GB", advice)


def require_reference(weights: Weights) -> None:
    """Refuse a model of which one layer does not fit as float64, before an engine reads it (MemoryError)."""
    needed = largest_part(weights, "float64")
    what = f"the float64 reference needs {needed / 1e9:.1f} GB for one layer"
    _require_free(needed, what, "close other programs, or use a machine with more memory")


def _require_free(needed: float, what: str, advice: str) -> None:
    if needed > (free := available_memory()):
        raise MemoryError(f"{what}, but {free / 1e9:.1f} GB are free; {advice}")
