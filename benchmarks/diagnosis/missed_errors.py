"""Inject errors into every stage of a right engine's dump; count stages that show them, before and after a tolerance.

    python -m benchmarks.diagnosis.missed_errors

The engine is the port, with all sums added one by one: a prompt of 18 tokens, and 24 tokens behind a cache of 1,176.
"narrow" are the tolerances of engines that llorch runs itself, "one lane" those of a dump of another engine. Each stage
is multiplied by 1.01, or gets random errors of ten times its narrow tolerance, after the stages behind it read it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from unittest import mock

import numpy as np

from benchmarks.diagnosis import arithmetic as how
from benchmarks.diagnosis import roundings as to
from benchmarks.diagnosis.asking import weights_of
from benchmarks.diagnosis.controls import MODELS
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import in_memory
from llorch.diagnosis import dump_checker
from llorch.diagnosis.replay import Replay
from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.stages.comparison import FAIL
from llorch.stages.stage_ref import Tokens

RUNS = {"18 keys": (18,), "1,200 keys": (1176, 24)}
ENGINES = {"narrow": "llorch", "one lane": "mine"}
Checks = Mapping[str, StageCheck]
Error = Callable[[str, np.ndarray], np.ndarray]  # of a stage key and an array


def add_one_by_one(port: Port) -> None:
    """Add all terms of all sums one by one."""
    how.together(how.products(to.one_by_one), how.divided_by_root)(port)

    def share(_original: object, scores: np.ndarray) -> np.ndarray:
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return exponentials / np.cumsum(exponentials, axis=-1)[..., -1:]

    port.around("share", share)


def run(model: str, sizes: tuple[int, ...]) -> StageDump:
    """Run the engine, and dump the last pass."""
    port = Port(model)
    add_one_by_one(port)
    ids = np.random.default_rng(0).integers(0, 300, sum(sizes)).tolist()
    for start, end in zip(np.cumsum((0, *sizes)), np.cumsum(sizes), strict=False):
        port.run(ids[start:end])
    n_before = len(ids) - sizes[-1]
    return replace(in_memory([Tokens(tuple(ids[n_before:]), n_before)], port.tape[-1:]), n_before=n_before)


def check(dump: StageDump, model: str, engine: str, error: Error | None = None) -> Checks:
    """Check every stage with the tolerances of an engine, as if an error were added after later stages read it."""
    original = dump_checker.pair_of

    def pair_of(replay: Replay, dumped: DumpedArray, name: str, *arrays: object) -> dump_checker.ArrayPair:
        pair = original(replay, dumped, name, *arrays)  # type: ignore[arg-type]
        return pair if error is None else replace(pair, actual=error(name, pair.actual))

    replay = Replay(weights_of(model), replace(dump, features=Features(engine=engine)))
    with mock.patch.object(dump_checker, "pair_of", pair_of):
        return {result.key: result for result in dump_checker.DumpChecker(replay).results()}


def ten_times(narrow: Checks) -> Error:
    """Make random errors of ten times the narrow tolerance."""
    rng = np.random.default_rng(0)

    def error(name: str, array: np.ndarray) -> np.ndarray:
        values = np.where(np.isfinite(array), array, 0)
        noise = rng.normal(size=array.shape) * (values != 0)
        size = 10 * narrow[name].isolated.tolerance.error * np.linalg.norm(values) / np.linalg.norm(noise)
        return array + size * noise

    return error


def count(title: str, dump: StageDump, model: str) -> Iterator[tuple[str, str, str, bool]]:
    """Yield title, error, tolerance and True if the stage fails, for each stage of a dump."""
    narrow = check(dump, model, ENGINES["narrow"])
    errors = {"right": None, "times 1.01": lambda name, array: array * 1.01, "10 tolerances": ten_times(narrow)}
    for tolerance, engine in ENGINES.items():
        for kind, error in errors.items():
            for result in check(dump, model, engine, error).values():
                yield title, kind, tolerance, result.verdict == FAIL


def main() -> None:
    """Print a line for each run and error: the stages that fail, of all."""
    failed, total = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for title, sizes in RUNS.items():
        for model in MODELS:
            for run_title, kind, name, fails in count(title, run(model, sizes), model):
                failed[run_title, kind, name] += fails
                total[run_title, kind, name] += 1
    print(f"{'':26}{''.join(f'{name:>16}' for name in ENGINES)}")
    for title, kind in dict.fromkeys(cell[:2] for cell in total):
        cells = (f"{failed[title, kind, name]} of {total[title, kind, name]}" for name in ENGINES)
        print(f"{title:12}{kind:14}{''.join(f'{cell:>16}' for cell in cells)}")


if __name__ == "__main__":
    main()
