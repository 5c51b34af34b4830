"""Fill the table: write inputs and float64 references, run one engine after the other, then confirm causes."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.atlas.catalogue import AtlasEngine
from benchmarks.atlas.inputs import AtlasInput, write_input
from benchmarks.atlas.judging import judge
from benchmarks.atlas.runs import NotInstalled, Request, RunEnd, python_of, run_all
from benchmarks.atlas.verdicts import DONE, UNREADABLE, EngineReport, confirmed, with_verdict
from llorch.engines import open_engine
from llorch.files import open_weights
from llorch.files.quant import ACTIVATION_TYPE, GGMLType
from llorch.runtime.errors import FormatError, GuardFailed
from llorch.stages.comparison import NOT_RUN

Progress = Callable[[str], None]


@dataclass(frozen=True)
class PreparedInput:
    """Written input, and its float64 reference.

    Attributes:
        input: Description of the input.
        model: Folder or file that engines load.
        source: Hugging Face folder with the same weights.
        reference: Every stage in float64, by trace key.
    """

    input: AtlasInput
    model: Path
    source: Path
    reference: Mapping[str, np.ndarray]


def prepare_inputs(inputs: Iterable[AtlasInput], home: Path, progress: Progress) -> Iterator[PreparedInput]:
    """Write inputs and compute their float64 references with transformers.

    Raises:
        MissingExtra: transformers is not installed.
    """
    references: dict[Path, Mapping[str, np.ndarray]] = {}
    folder = home / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    for atlas_input in inputs:
        progress(f"{atlas_input.name}: the float64 reference")
        try:
            model = write_input(atlas_input, folder)
        except FormatError:
            if atlas_input.gguf:  # GGUF cannot express the model: there is no such input
                continue
            raise
        source = write_input(replace(atlas_input, gguf=False), folder)
        ids = [token for part in atlas_input.parts for token in part]
        if source not in references:
            with open_engine("transformers", source, dtype="float64") as engine:
                references[source] = engine.trace(ids)
        yield PreparedInput(atlas_input, model, source, references[source])


def fill(
    engines: Sequence[AtlasEngine], inputs: Iterable[AtlasInput], home: Path, progress: Progress
) -> Iterator[list[EngineReport]]:
    """Run engines on inputs and judge them.

    Args:
        engines: Engines, in their order.
        inputs: Inputs of the engines; an engine skips those that it cannot read.
        home: A folder for environments, inputs and runs; existing environments and inputs are used again.
        progress: Called with a line about each step.

    Yields:
        All verdicts of an engine, when its runs have ended.
    """
    with ThreadPoolExecutor(1) as installer:  # installs the next engine while one runs
        environments = [installer.submit(python_of, engine, home) for engine in engines]
        try:
            prepared = list(prepare_inputs(inputs, home, progress))
            for engine, environment in zip(engines, environments, strict=True):
                yield list(confirmed(list(_run_engine(engine, environment, prepared, home, progress))))
        finally:
            installer.shutdown(wait=False, cancel_futures=True)


def _run_engine(
    engine: AtlasEngine, environment: Future[Path], prepared: Sequence[PreparedInput], home: Path, progress: Progress
) -> Iterator[EngineReport]:
    """Run an engine with each of its options on all inputs that it reads, and yield the verdicts."""
    try:
        progress(f"{engine.name}: the environment")
        python = environment.result()
    except NotInstalled as error:
        yield EngineReport(engine.name, "", NO_INPUT, "", NOT_RUN, str(error))
        return
    for way, options in engine.ways.items():
        readable = [p for p in prepared if engine.reads(way, gguf=p.input.gguf, quantised=p.input.is_quantised)]
        if not readable:
            continue
        folder = home / "runs" / engine.script / (way.replace(" ", "-") or "plain")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        requests = [_request(p, folder, dict(options)) for p in readable]
        command = [str(python), str(engine.adapter)]
        n_done = 0

        def report(end: RunEnd, label: str = f"{engine.name} {way}".strip(), n_runs: int = len(requests)) -> None:
            nonlocal n_done
            n_done += 1
            progress(f"{label}: {n_done} of {n_runs} runs")

        for p, request, end in zip(readable, requests, run_all(command, requests, folder, report=report), strict=True):
            verdict = _verdict(engine.name, way, p, Path(request.out), end)
            yield replace(verdict, message=verdict.message.replace(str(home), "HOME"))
        shutil.rmtree(folder, ignore_errors=True)


NO_INPUT = AtlasInput("")


def _request(prepared: PreparedInput, folder: Path, options: dict[str, object]) -> Request:
    """Build the request for one run; `options` gets the rounding of activations that ggml applies to a GGUF file."""
    name = prepared.input.name
    if prepared.input.gguf and (kind := rounded_inputs(prepared.model)):
        options |= {"activations": kind}
    return Request(
        str(prepared.model), prepared.input.parts, str(folder / name), str(folder / f"{name}-scratch"), options
    )


def rounded_inputs(file: Path) -> str:
    """Name the blocks that ggml's CPU backend rounds the inputs of a file's products to; empty if it rounds none."""
    weights = open_weights(file)
    with closing(weights.source):
        kinds = {weights.as_stored(name).ggml_type for name in weights if len(weights.shape(name)) > 1}
    rounded = {ACTIVATION_TYPE[kind] for kind in kinds if isinstance(kind, GGMLType)}
    return max(rounded & {"Q8_0", "Q8_1", "Q8_K"}, default="")


def _verdict(engine: str, way: str, prepared: PreparedInput, dump: Path, end: RunEnd) -> EngineReport:
    """Judge the dump of a run; a run that failed, or a dump that cannot be compared, has only an outcome."""
    report = EngineReport(engine, way, prepared.input, end.outcome, "", end.error, end.version, end.seconds)
    if end.outcome != DONE:
        return report
    try:
        run_report = judge(prepared.source, dump, prepared.reference)
    except (FormatError, GuardFailed, ValueError) as error:
        return replace(report, outcome=UNREADABLE, message=str(error))
    return with_verdict(report, run_report)
