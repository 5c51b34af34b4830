"""Verify a model from end to end: a built-in model against stored goldens, any model against engines that run now.

The caller selects llorch's runners, such as NumPy or torch. All runners get the same goldens (outputs of reference
engines), the same float64 reference (transformers in float64) and tolerances. Comparisons are grouped by validation
points, `00` to `20` of `stages.table.CHECKPOINTS`, which are no weights files.
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
    compare_matrices,
    compare_tensors,
    compare_tokens,
    decode_rows,
    library_tensors,
    llorch_tensors,
)
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.long_contexts import LongSuite
from llorch.judging.expectations.own_form import compare_with_own_form
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

Runners = Callable[..., Iterable[Runner]]  # (weights, has_reference=whether there is a float64 reference) -> runners


@dataclass(frozen=True)
class LiveOutput:
    """Outputs of reference engines that ran now on a file."""

    weights: Weights
    engine_outputs: Mapping[str, EngineOutput]  # by engine; engines that could not run the model are absent
    reference: ReferenceOutput | None  # None if transformers cannot run the model
    texts: Sequence[TokenCheck]  # the prompt, with the token ids of each engine's tokenizer


def verify_stored(
    name: str, runners: Runners = numpy_runners, *, backend: str = "numpy", long: bool = True
) -> Iterator[Comparison]:
    """Verify a built-in model against its stored goldens: the file and tokens first, then each runner.

    `backend` is named in comparisons of the file. `long`: compare long contexts, too; a wheel lacks their goldens.

    Raises:
        FileNotFoundError: A golden is missing.
        UserError: The goldens were computed with other weights.
        CheckpointMismatch: A runner ran another model, or ran on another device than requested.
    """
    weights, golden = stored(name)
    yield from compare_tensors(name, llorch_tensors(weights.source), golden.tensors, backend=backend)
    yield from compare_tokens(name, Model(weights).tokenizer.encode, golden.tokens, backend=backend)
    suite = ForwardExpectations(name, weights, golden.cases, golden.engine_outputs, golden.reference)
    load_path = golden.reference.engine_output.load_path
    long_suite = open_long_golden(name, weights, load_path) if long and not is_wheel() else None
    for runner in runners(weights, has_reference=True):
        yield from check_runner(suite, runner)
        yield from long_suite.comparisons(runner) if long_suite else ()


def open_long_golden(name: str, weights: Weights, load_path: LoadPath | None = None) -> LongSuite:
    """Open the goldens of long contexts of a built-in model; raise the errors of `verify_stored`."""
    golden = read_long(goldens_folder() / name)
    require_weights(name, golden.weights_sha256)
    if golden.cases.keys() != long_cases(weights.config).keys():
        raise UserError(f"golden {name}: expected the cases {', '.join(long_cases(weights.config))} of long contexts, "
                         f"got {', '.join(golden.cases)}; run reference_outputs/regenerate.py")  # fmt: skip
    return LongSuite(name, weights, golden, load_path)


def stored(name: str) -> tuple[Weights, Golden]:
    """Open a built-in model and its goldens; raise the errors of `verify_stored`."""
    golden = read(goldens_folder() / name)
    weights = open_weights(require_weights(name, golden.provenance["weights_sha256"]))
    unsupported = unable_engines(ENGINES, weights.config, golden.cases["near"].ids, N_GREEDY)
    if golden.unsupported_reason != unsupported:
        actual = golden.unsupported_reason
        raise UserError(f"golden {name}: leaves out {actual}, expected {unsupported}; run regenerate.py")
    return weights, golden


def unable_engines(engines: Iterable[str], config: ModelConfig, ids: Sequence[int], n_greedy: int) -> dict[str, str]:
    """Return the engines that cannot run a model for the cases of this prompt, with the reasons."""
    n_tokens = len(ids) + n_greedy
    if config.temperature is not None or any(layer.chunk for layer in config.layers):  # so the far case counts
        n_tokens = max(n_tokens, int(cases_for(ids, config)["far"].positions[-1]) + 1)
    reasons = ((engine, unsupported_reason(engine, config, n_tokens)) for engine in engines)
    return {engine: reason for engine, reason in reasons if reason}


@dataclass(frozen=True)
class LivePlan:
    """Inputs of a live comparison, resolved before an engine runs; see `plan_live`."""

    weights: Weights
    name: str
    ids: Sequence[int]  # token ids of the prompt
    text: str | None  # prompt text, if llorch tokenized it; the engines then tokenize it too
    cases: Mapping[str, Pass]  # inputs by name, see `cases_for`
    n_greedy: int  # number of tokens to generate
    engines: Sequence[EngineName]  # engines to run
    unsupported: Mapping[str, str]  # engines that cannot check the model, with the reasons


def plan_live(
    weights: Weights, ids: Sequence[int], engines: Sequence[EngineName], *, text: str | None = None
) -> LivePlan:
    """Resolve the inputs of `verify_live`. Pass the prompt's `text` to compare its token ids with the engines', too."""
    n_greedy = n_greedy_for(weights.config, len(ids))
    unsupported = unable_engines(engines, weights.config, ids, n_greedy)
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
    """Verify any model against reference engines that run now: the file and tokens first, then each runner.

    `failed` collects the engines that could not run the model, with the reasons. Without it an engine raises
    MemoryError if the traces or the model do not fit, MissingExtra if it is not installed, and RuntimeError if it
    failed. A runner that ran another model, or on another device than requested, always raises CheckpointMismatch.
    """
    outputs = run_engines(plan, progress=progress, failed=failed)
    if not outputs.engine_outputs:  # all failed
        return
    progress("reading the tensor table")
    source = outputs.weights.source
    yield from compare_tensors(plan.name, llorch_tensors(source), library_tensors(plan.weights.path), backend=backend)
    if outputs.texts:
        yield from compare_tokens(plan.name, Model(outputs.weights).tokenizer.encode, outputs.texts, backend=backend)
    if isinstance(source, QuantisedFolder):
        progress("decoding the matrices")
        yield from compare_matrices(plan.name, source)
    suite = ForwardExpectations(plan.name, outputs.weights, plan.cases, outputs.engine_outputs, outputs.reference)
    for runner in runners(outputs.weights, has_reference=outputs.reference is not None):
        progress(f"comparing {runner.name}")
        yield from check_runner(suite, runner)


def run_engines(plan: LivePlan, *, progress: Progress, failed: dict[str, str] | None) -> LiveOutput:
    """Run the reference engines of a plan, then the float64 reference; raise the errors of `verify_live`."""
    weights, config = plan.weights, plan.weights.config
    residency_plan = plan_residency(weights, n_tokens=len(plan.ids))
    require_memory(
        config, len(plan.ids), n_traces=3 * len(plan.engines) + 3
    )  # estimated; a float64 trace counts as two
    require_engines(weights, plan.engines, llorch_bytes=residency_plan.needed)
    start((*plan.engines, "transformers"))  # child processes; transformers computes the float64 reference
    engine_outputs: dict[str, EngineOutput] = {}
    ids_by_engine: dict[str, Sequence[int]] = {}
    for name in plan.engines:
        progress(f"running {name}")
        with note_failure(name, failed):
            engine_outputs[name], token_ids = _run_engine(name, plan, _with_engine(progress, name))
            ids_by_engine |= {name: token_ids} if token_ids is not None else {}
    texts = [TokenCheck(plan.text, ids_by_engine)] if plan.text is not None else []
    reference: ReferenceOutput | None = None
    if engine_outputs:
        progress(f"running {FLOAT64_REFERENCE}")
        with note_failure(FLOAT64_REFERENCE, failed):
            require_reference(weights)
            report = _with_engine(progress, FLOAT64_REFERENCE)
            reference = run_reference(weights.path, plan.cases, engine_outputs, n_greedy=plan.n_greedy, progress=report)
    without_nan: dict[str, EngineOutput] = {}  # an engine with NaN counts as failed
    for name, output in engine_outputs.items():
        with note_failure(name, failed):
            require_numbers(name, config.family, output, reference)
            without_nan[name] = output
    if residency_plan.residency == "packed":
        weights = SharedWeights(weights, progress)
    return LiveOutput(weights, without_nan, reference, texts)


def _run_engine(name: EngineName, plan: LivePlan, progress: Progress) -> tuple[EngineOutput, Sequence[int] | None]:
    """Run one reference engine; return its outputs and its token ids of the plan's text."""
    _require_supported(name, plan.weights.path, plan.unsupported)
    with open_engine(name, plan.weights.path, progress=progress) as engine:
        output = run_cases(engine, plan.cases, n_greedy=plan.n_greedy)
        token_ids = engine.tokenize(plan.text, add_special=True, parse_special=False) if plan.text is not None else None
        return output, token_ids


def _require_supported(engine: str, path: Path, unsupported: Mapping[str, str]) -> None:
    if engine in unsupported:
        raise UserError(f"{engine}: cannot judge {path}: {unsupported[engine]}")


def _with_engine(progress: Progress, name: str) -> Progress:
    """Return a progress function that adds the name of the engine."""
    return lambda stage: progress(f"running {name}: {stage}")


def verify_ggml(
    model: Model,
    ids: Sequence[int],
    *,
    text: str | None = None,
    progress: Progress = lambda line: None,
    failed: dict[str, str] | None = None,
) -> Iterator[Comparison]:
    """Verify a GGUF file under ggml numerics (activations rounded as in llama.cpp) against llama.cpp on the same file.

    With ggml's kernels, also verify every product against llorch's own form. Pass the prompt's `text` to compare its
    token ids, too. For `failed` see `verify_live`.
    """
    require_memory(model.config, len(ids) + n_greedy_for(model.config, len(ids)), n_traces=6)
    progress("running llamacpp")
    with note_failure("llamacpp", failed):
        cases, engine_output, texts = _run_as_stored(model, ids, text)
    if failed:
        return
    progress("comparing tensors")
    name, weights = model.name, model.weights
    yield from compare_tensors(name, llorch_tensors(weights.source), library_tensors(weights.path))
    if texts:
        yield from compare_tokens(name, model.tokenizer.encode, texts)
    yield from decode_rows(name, weights)
    progress("comparing stages")
    weights = SharedWeights(weights, progress) if weights.packed else weights
    suite = ForwardExpectations(name, weights, cases, {"llamacpp": engine_output}, None, n_prompt=len(ids))
    tolerances = {case: suite.tolerances(case) for case in cases}
    yield from check_runner(suite, GgmlRunner(weights, engine_output.traces, tolerances))
    if weights.numerics.kernels == "ggml":
        for case, inputs in cases.items():
            yield from compare_with_own_form(name, weights, inputs, engine_output.traces[case], tolerances[case], case)


def _run_as_stored(
    model: Model, ids: Sequence[int], text: str | None
) -> tuple[Mapping[str, Pass], EngineOutput, Sequence[TokenCheck]]:
    """Run llama.cpp on the unchanged GGUF file; return the cases, its outputs and its token ids of the text.

    The case `near` is the prompt and the greedy text, so that one trace has the logits of every generated token.
    """
    weights, config = model.weights, model.config
    n_greedy = n_greedy_for(config, len(ids))
    _require_supported("llamacpp", weights.path, unable_engines(("llamacpp",), config, ids, n_greedy))
    with open_engine("llamacpp", weights.path, numerics=weights.numerics) as engine:
        greedy = engine.greedy(ids, n_greedy)
        cases = cases_for(ids, config) | {"near": Pass((*ids, *greedy[:-1]))}
        output = replace(run_cases(engine, cases, n_greedy=1), greedy=np.asarray(greedy, np.int64))
        require_numbers("llamacpp", config.family, output, None)
        token_ids = None if text is None else engine.tokenize(text, add_special=True, parse_special=False)
        texts = [] if text is None or token_ids is None else [TokenCheck(text, {"llamacpp": token_ids})]
        return cases, output, texts


def require_memory(config: ModelConfig, n_tokens: int, *, n_traces: int) -> None:
    """Raise MemoryError if `n_traces` float32 traces of a prompt do not fit; attention grows with n_tokens squared."""
    n_numbers = sum(math.prod(stage.shape(config, seq=n_tokens, ctx=n_tokens)) for _, stage, _ in keys(config))
    n_bytes = 4 * n_numbers * n_traces
    need = f"verify: the traces of {n_tokens} tokens need {n_bytes / 1e9:.1f} GB"
    _require_free(n_bytes, need, "give a shorter prompt")


def require_engines(weights: Weights, engines: Sequence[EngineName], *, llorch_bytes: float) -> None:
    """Raise MemoryError if an engine's model does not fit in addition to llorch's `llorch_bytes`."""
    # llama.cpp maps the file; transformers needs its own copy of at least one layer.
    n_bytes = llorch_bytes + largest_part(weights, "float32") * ("transformers" in engines)
    need = f"{weights.path}: exact numerics need at least one layer in float32 in every engine"
    advice = "use --numerics ggml, or --against llamacpp alone"
    _require_free(n_bytes, f"{need}, about {n_bytes / 1e9:.1f} GB", advice)


def require_reference(weights: Weights) -> None:
    """Raise MemoryError if one layer of the model does not fit into memory as float64."""
    n_bytes = largest_part(weights, "float64")
    need = f"the float64 reference needs {n_bytes / 1e9:.1f} GB for one layer"
    _require_free(n_bytes, need, "close other programs, or use a machine with more memory")


def _require_free(n_bytes: float, need: str, advice: str) -> None:
    if n_bytes > (free := available_memory()):
        raise MemoryError(f"{need}, but {free / 1e9:.1f} GB are free; {advice}")
