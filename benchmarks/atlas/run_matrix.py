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
class Fed:
    """Written input, and its float64 reference.

    Attributes:
        input: The input.
        model: The folder or file that engines are given.
        source: The folder whose numbers it has.
        reference: Every stage in float64, by trace key.
    """

    input: AtlasInput
    model: Path
    source: Path
    reference: Mapping[str, np.ndarray]


def prepare_inputs(inputs: Iterable[AtlasInput], home: Path, progress: Progress) -> Iterator[Fed]:
    """Write inputs and compute their float64 references with transformers.

    Raises:
        MissingExtra: transformers is not installed.
    """
    truths: dict[Path, Mapping[str, np.ndarray]] = {}
    folder = home / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    for this in inputs:
        progress(f"{this.name}: the float64 reference")
        try:
            model = write_input(this, folder)
        except FormatError:
            if this.gguf:  # no such file can say it: there is no such input
                continue
            raise
        source = write_input(replace(this, gguf=False), folder)
        ids = [token for part in this.parts for token in part]
        if source not in truths:
            with open_engine("transformers", source, dtype="float64") as engine:
                truths[source] = engine.trace(ids)
        yield Fed(this, model, source, truths[source])


def fill(
    engines: Sequence[AtlasEngine], inputs: Iterable[AtlasInput], home: Path, progress: Progress
) -> Iterator[list[EngineReport]]:
    """Run engines on inputs and judge them.

    Args:
        engines: Engines, in their order.
        inputs: Inputs of the engines; an engine skips those that it cannot read.
        home: A folder for environments, inputs and runs; existing environments and inputs are used again.
        progress: Told what is being done.

    Yields:
        All verdicts of an engine, when its runs have ended.
    """
    with ThreadPoolExecutor(1) as installer:  # packages of the next come while one runs
        environments = [installer.submit(python_of, engine, home) for engine in engines]
        try:
            fed = list(prepare_inputs(inputs, home, progress))
            for engine, environment in zip(engines, environments, strict=True):
                yield list(confirmed(list(_of_engine(engine, environment, fed, home, progress))))
        finally:
            installer.shutdown(wait=False, cancel_futures=True)


def _of_engine(
    engine: AtlasEngine, environment: Future[Path], fed: Sequence[Fed], home: Path, progress: Progress
) -> Iterator[EngineReport]:
    """Run an engine with each of its options on all inputs that it reads, and yield the verdicts."""
    try:
        progress(f"{engine.name}: the environment")
        python = environment.result()
    except NotInstalled as error:
        yield EngineReport(engine.name, "", NO_INPUT, "", NOT_RUN, str(error))
        return
    for way, options in engine.ways.items():
        readable = [each for each in fed if engine.reads(way, gguf=each.input.gguf, quantised=each.input.is_quantised)]
        if not readable:
            continue
        folder = home / "runs" / engine.script / (way.replace(" ", "-") or "plain")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        requests = [_request(each, folder, dict(options)) for each in readable]
        command = [str(python), str(engine.adapter)]
        n_done = 0

        def told(ended: RunEnd, of: str = f"{engine.name} {way}".strip(), n_runs: int = len(requests)) -> None:
            nonlocal n_done
            n_done += 1
            progress(f"{of}: {n_done} of {n_runs} runs")

        for each, request, ended in zip(
            readable, requests, run_all(command, requests, folder, report=told), strict=True
        ):
            verdict = _verdict(engine.name, way, each, Path(request.out), ended)
            yield replace(verdict, message=verdict.message.replace(str(home), "HOME"))
        shutil.rmtree(folder, ignore_errors=True)


NO_INPUT = AtlasInput("")


def _request(this: Fed, folder: Path, options: dict[str, object]) -> Request:
    """Build the request for one run; `options` gets the rounding of activations that ggml applies to a GGUF file."""
    name = this.input.name
    if this.input.gguf and (kind := rounded_inputs(this.model)):
        options |= {"activations": kind}
    return Request(str(this.model), this.input.parts, str(folder / name), str(folder / f"{name}-scratch"), options)


def rounded_inputs(file: Path) -> str:
    """Name the blocks that ggml's CPU backend rounds the inputs of a file's products to; empty if it rounds none."""
    weights = open_weights(file)
    with closing(weights.source):
        kinds = {weights.as_stored(name).ggml_type for name in weights if len(weights.shape(name)) > 1}
    rounded = {ACTIVATION_TYPE[kind] for kind in kinds if isinstance(kind, GGMLType)}
    return max(rounded & {"Q8_0", "Q8_1", "Q8_K"}, default="")


def _verdict(engine: str, way: str, this: Fed, dump: Path, ended: RunEnd) -> EngineReport:
    """Judge the dump of a run; a run that failed or a dump that cannot be compared has an outcome alone."""
    report = EngineReport(engine, way, this.input, ended.outcome, "", ended.error, ended.version, ended.seconds)
    if ended.outcome != DONE:
        return report
    try:
        run_report = judge(this.source, dump, this.reference)
    except (FormatError, GuardFailed, ValueError) as error:
        return replace(report, outcome=UNREADABLE, message=str(error))
    return with_verdict(report, run_report)
