"""Outputs of the reference engines for a model: from engines that run now, or stored as goldens.

A *case* is an input: `near` starts at position 0, `far` starts at about position 4,000, where RoPE angles are large.
Goldens of one engine are in one file, and so is the float64 reference (unmodified transformers in float64, stored under
the name `truth`), see `store`. Array names are `<case>/<stage key>`.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llorch.engines import Call, LoadPath, ReferenceEngine, stored_load_path
from llorch.families.config import ModelConfig
from llorch.files.tensor_names import inventory
from llorch.judging.goldens.store import Distances, GoldenStore, golden_error, read_distances, write_distances
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import builtin_path, is_wheel
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import Pass

ENGINES = ("llamacpp", "transformers")
REFERENCE = "truth"  # file name of the float64 reference
STEP_LOGITS = "near/step_logits"
FAR_POSITION = 4000
FAR_TOKENS = 8
N_GREEDY = 24  # generated tokens
N_GREEDY_OF_LARGE = {1e8: 8, 1e9: 4}  # number of weights -> limit, because every token reads all weights
SAMPLINGS: Mapping[str, SamplingSettings] = {
    "temperature": SamplingSettings(temperature=0.7),
    "top_k": SamplingSettings(temperature=1.0, top_k=7),
    "top_p": SamplingSettings(temperature=1.3, top_p=0.8),
    "min_p": SamplingSettings(temperature=1.0, min_p=0.02),
    "penalty": SamplingSettings(temperature=1.0, repetition_penalty=1.4),
    "all": SamplingSettings(temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
}


@dataclass(frozen=True)
class EngineOutput:
    """Outputs of one reference engine.

    Attributes:
        traces: Trace of each case.
        selected_logits: Logits that the engine's sampler reads after the tokens of `near`.
        probabilities: By name in `SAMPLINGS`: distribution that the engine computes from `sampler_inputs`.
        greedy: Token ids of the greedy continuation of `near`.
        load_path: Tools that loaded the file into the engine.
    """

    traces: Mapping[str, Mapping[str, np.ndarray]]
    selected_logits: np.ndarray
    probabilities: Mapping[str, np.ndarray]
    greedy: np.ndarray
    load_path: LoadPath

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by the names in the golden file."""
        arrays = {f"{case}/{key}": array for case, trace in self.traces.items() for key, array in trace.items()}
        arrays |= {f"near/probabilities.{name}": array for name, array in self.probabilities.items()}
        return arrays | {"near/selected_logits": self.selected_logits, "near/generation": self.greedy}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], load_path: LoadPath) -> "EngineOutput":
        """Rebuild the engine output from the result of `arrays`."""
        traces: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            case, key = name.split("/")
            traces.setdefault(case, {})[key] = array
        near = traces["near"]
        return cls(
            selected_logits=near.pop("selected_logits"),
            greedy=near.pop("generation"),
            probabilities={name: near.pop(f"probabilities.{name}") for name in SAMPLINGS},
            traces=traces,
            load_path=load_path,
        )


@dataclass(frozen=True)
class ReferenceOutput:
    """Outputs of unmodified transformers in pure float64, see `llorch.judging.goldens.float64_reference`.

    Attributes:
        engine_output: Outputs in float64.
        step_logits: Logits of every step of the greedy text, (steps, vocab).
        isolated: Distance of each golden from the float64 output of its stage for the golden's inputs; `attention`
            (scores, probabilities and context in one) counts as a stage, too.
    """

    engine_output: EngineOutput
    step_logits: np.ndarray
    isolated: Distances


@dataclass(frozen=True)
class TokenCheck:
    """A text and the token ids of each engine's tokenizer."""

    text: str
    ids: Mapping[str, Sequence[int]]  # by engine


@dataclass(frozen=True)
class Golden:
    """Stored goldens of one model; `judging.tolerances` derives the tolerances from them."""

    cases: Mapping[str, Pass]
    engine_outputs: Mapping[str, EngineOutput]  # by engine
    reference: ReferenceOutput
    tensors: Mapping[
        str, str
    ]  # tensor table of the model file, read by an independent package, see `expectations.files`
    tokens: Sequence[TokenCheck]
    provenance: Mapping[str, object]
    unsupported_reason: Mapping[str, str] = field(default_factory=dict)  # engines without goldens, with the reasons


def cases_for(ids: Sequence[int], config: ModelConfig) -> dict[str, Pass]:
    """Create the inputs of both cases from one prompt; a short context moves `far` to its end."""
    n_far = min(FAR_TOKENS, len(ids))
    far = min(_far_position(config, n_far), config.max_position_embeddings - n_far)
    return {"near": Pass(tuple(ids)), "far": Pass(tuple(ids[:n_far]), far)}


def _far_position(config: ModelConfig, n_far: int) -> int:
    """Choose a start so that a chunk boundary or temperature step, if the model has any, is inside the far tokens."""
    chunks = [layer.chunk for layer in config.layers if layer.chunk is not None]
    steps = chunks or [config.temperature.floor] if config.temperature is not None else chunks
    return -(-FAR_POSITION // steps[0]) * steps[0] - n_far // 2 if steps else FAR_POSITION


def n_greedy_for(config: ModelConfig, n_prompt: int) -> int:
    """Choose the number of tokens to generate; the context and the size of the model limit it."""
    n_elements = sum(math.prod(weight.shape) for weight in inventory(config).values())
    limits = [N_GREEDY, *(n for size, n in N_GREEDY_OF_LARGE.items() if n_elements > size)]
    return min(*limits, config.max_position_embeddings - n_prompt + 1)


def sampler_inputs(ids: Sequence[int], vocab_size: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Create logits and a token history as input of the sampling filters, from a prompt.

    Logits have both signs, and no token dominates, because a confident distribution would hide most mistakes. The
    history repeats tokens, and likely tokens too, so that the repetition penalty changes the distribution.
    """
    logits = np.random.default_rng(vocab_size).normal(0, 2, vocab_size).astype(np.float32)
    likely = [int(token) for token in np.argsort(-logits)[:4]]
    return logits, (*ids, *ids[:3], *likely, *likely)


def run_cases(engine: ReferenceEngine, cases: Mapping[str, Pass], *, n_greedy: int = N_GREEDY) -> EngineOutput:
    """Run a reference engine on every case of `cases_for`; `n_greedy` is the number of tokens to generate."""
    return collect_output(engine, cases, engine.call_batch(calls_for(cases, n_greedy)))


def calls_for(cases: Mapping[str, Pass], n_greedy: int) -> list[Call]:
    """List the calls of all cases for `ReferenceEngine.call_batch`; the first is the greedy continuation."""
    near = cases["near"].ids
    traces: list[Call] = [("trace", (case.ids,), {"first_position": case.first_position}) for case in cases.values()]
    return [("greedy", (near, n_greedy), {}), ("selected_logits", (near,), {}), *traces]


def collect_output(engine: ReferenceEngine, cases: Mapping[str, Pass], returned: Sequence[Any]) -> EngineOutput:
    """Build the engine output from the return values of `calls_for`, and run the engine's sampling filters."""
    greedy, selected, *traces = returned
    logits, history = sampler_inputs(cases["near"].ids, selected.size)
    return EngineOutput(
        traces=dict(zip(cases, traces, strict=True)),
        selected_logits=selected,
        probabilities={name: engine.probabilities(logits, settings, history) for name, settings in SAMPLINGS.items()},
        greedy=np.asarray(greedy, np.int64),
        load_path=engine.load_path,
    )


@contextmanager
def note_failure(name: str, failed: dict[str, str] | None) -> Iterator[None]:
    """Record in `failed` why the engine `name` failed on a model; raise the error if `failed` is None."""
    try:
        yield
    except (ImportError, LookupError, MemoryError, OSError, RuntimeError, ValueError) as error:
        if failed is None:
            raise
        kind = (
            type(error).__name__ if isinstance(error, LookupError) or not str(error) else ""
        )  # KeyError: only the key
        failed[name] = " ".join([kind, *str(error).split()]).strip()


def save(folder: Path, golden: Golden) -> None:
    """Write the goldens of one model; the same content gives the same bytes."""
    files = {engine: engine_output.arrays() for engine, engine_output in golden.engine_outputs.items()}
    files[REFERENCE] = golden.reference.engine_output.arrays() | {STEP_LOGITS: golden.reference.step_logits}
    record = ({"cannot_judge": golden.unsupported_reason} if golden.unsupported_reason else {}) | {
        "cases": {name: asdict(case) for name, case in golden.cases.items()},
        "isolated": write_distances(golden.reference.isolated),
        "provenance": golden.provenance,
        "tensors": golden.tensors,
        "tokens": [asdict(check) for check in golden.tokens],
    }
    GoldenStore(folder).write(record, files)


def read(folder: Path) -> Golden:
    """Read the goldens that `save` wrote. A missing golden is a failure, never a pass.

    Raises:
        FileNotFoundError: A file is missing.
        UserError: A part of a file is missing.
    """
    store = GoldenStore(folder)
    record, unsupported = store.record(), read_unsupported(folder)
    engines = [name for name in ENGINES if name not in unsupported]
    arrays_by_engine = store.arrays([*engines, REFERENCE])
    _require_complete(store.path, record, engines)
    step_logits = arrays_by_engine[REFERENCE].pop(STEP_LOGITS)
    load_paths = {name: stored_load_path(record["provenance"], name) for name in arrays_by_engine}
    outputs = {name: EngineOutput.from_arrays(arrays, load_paths[name]) for name, arrays in arrays_by_engine.items()}
    return Golden(
        reference=ReferenceOutput(outputs.pop(REFERENCE), step_logits, read_distances(record["isolated"])),
        cases={name: Pass(tuple(case["ids"]), case["first_position"]) for name, case in record["cases"].items()},
        engine_outputs=outputs,
        tensors=record["tensors"],
        tokens=[TokenCheck(**check) for check in record["tokens"]],
        provenance=record["provenance"],
        unsupported_reason=unsupported,
    )


def _require_complete(path: Path, record: Mapping[str, Any], engines: Sequence[str]) -> None:
    """Raise UserError if a record lacks cases, tensors, texts, or the distances of an engine.

    In a wheel `near` may be the only case.
    """
    is_short = is_wheel() and record["cases"].keys() == {"near"}
    if not (is_short or record["cases"].keys() == {"near", "far"}) or not record["tensors"] or not record["tokens"]:
        n_tensors, n_texts = len(record["tensors"]), len(record["tokens"])
        actual = f"cases {sorted(record['cases'])}, {n_tensors} tensors, {n_texts} texts"
        raise golden_error(path, f"expected the cases near and far, tensors and tokens, got {actual}")
    distances = record.get("isolated", {})
    if distances.keys() != {*engines}:
        expected = " and ".join(engines)
        raise golden_error(path, f"expected isolated distances for {expected}, got {sorted(distances) or 'none'}")


def read_unsupported(folder: Path) -> Mapping[str, str]:
    """Read which reference engines the stored goldens lack, with the reasons.

    Raises:
        FileNotFoundError: There are no goldens.
        UserError: A reason is missing, or no reference engine remains.
    """
    store = GoldenStore(folder)
    unsupported = store.record().get("cannot_judge", {})
    if not unsupported.keys() < {*ENGINES} or not all(unsupported.values()):
        expected = f"expected reasons for some of {' and '.join(ENGINES)} in cannot_judge"
        raise golden_error(store.path, f"{expected}, got {unsupported}")
    return unsupported


def require_weights(name: str, weights_sha256: object) -> Path:
    """Return the path of a built-in model; raise UserError if its hash differs from `weights_sha256`, the golden's."""
    path = builtin_path(name)
    if weights_sha256 != sha256(path):
        raise UserError(f"golden {name}: expected the weights {path}, got others; run reference_outputs/regenerate.py")
    return path


def sha256(path: Path) -> str:
    """Hash the bytes of a file, or the names and hashes of the files in a folder."""
    if path.is_dir():
        files = "".join(f"{file.name} {sha256(file)}\n" for file in sorted(path.iterdir()))
        return hashlib.sha256(files.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
