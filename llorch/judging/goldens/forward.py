"""Outputs of the reference engines for a model: of engines that run now, or stored as goldens.

A *case* is an input: `near` starts at position 0, `far` some thousands of positions on, where RoPE angles are large.
Goldens of one engine are in one file, see `store`; names are `<case>/<stage key>`. So is the float64 reference.
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
from llorch.judging.goldens.store import Distances, GoldenStore, plain_distances, read_distances, refused
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import UserError
from llorch.stages.stage_ref import Pass

ENGINES = ("llamacpp", "transformers")
REFERENCE = "truth"
STEP_LOGITS = "near/step_logits"
FAR_POSITION = 4000
FAR_TOKENS = 8
N_GREEDY = 24
N_GREEDY_OF_LARGE = {1e8: 8, 1e9: 4}  # above so many elements: every engine goes through all of them for each token
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
        traces: Case to trace.
        selected_logits: The row its sampler sees after the tokens of `near`.
        probabilities: Name in `SAMPLINGS` to its distribution, made from `sampler_inputs`.
        greedy: Its greedy continuation of `near`.
        load_path: How the engine loaded the file.
    """

    traces: Mapping[str, Mapping[str, np.ndarray]]
    selected_logits: np.ndarray
    probabilities: Mapping[str, np.ndarray]
    greedy: np.ndarray
    load_path: LoadPath

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every array under one name, as stored."""
        flat = {f"{case}/{key}": array for case, trace in self.traces.items() for key, array in trace.items()}
        flat |= {f"near/probabilities.{name}": array for name, array in self.probabilities.items()}
        return flat | {"near/selected_logits": self.selected_logits, "near/generation": self.greedy}

    @classmethod
    def from_arrays(cls, flat: Mapping[str, np.ndarray], load_path: LoadPath) -> "EngineOutput":
        """Rebuild the engine output from the result of `arrays`."""
        traces: dict[str, dict[str, np.ndarray]] = {}
        for name, array in flat.items():
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
    """Values of a reference engine in pure float64, see `llorch.judging.goldens.float64_reference`.

    Attributes:
        engine_output: Its outputs, in float64.
        step_logits: Logits of every step of its greedy text, (steps, vocab).
        isolated: How far each golden is from what float64 makes of its own inputs; with `l0.attention` of each layer.
    """

    engine_output: EngineOutput
    step_logits: np.ndarray
    isolated: Distances


@dataclass(frozen=True)
class TokenCheck:
    """A text and the ids that each engine's tokenizer gives for it."""

    text: str
    ids: Mapping[str, Sequence[int]]  # by engine


@dataclass(frozen=True)
class Golden:
    """The stored goldens of one model; tolerances are derived from them by the judge, see `tolerances`."""

    cases: Mapping[str, Pass]
    engine_outputs: Mapping[str, EngineOutput]  # by engine
    reference: ReferenceOutput
    tensors: Mapping[str, str]  # the file's tensor table by a foreign reader, see `expectations.files`
    tokens: Sequence[TokenCheck]
    provenance: Mapping[str, object]
    unsupported_reason: Mapping[str, str] = field(default_factory=dict)  # engines that have none, and why


def cases_for(ids: Sequence[int], config: ModelConfig) -> dict[str, Pass]:
    """Make the inputs from one prompt, by case: at the start, and as far on as the context allows."""
    n_far = min(FAR_TOKENS, len(ids))
    far = min(_far_position(config, n_far), config.max_position_embeddings - n_far)
    return {"near": Pass(tuple(ids)), "far": Pass(tuple(ids[:n_far]), far)}


def _far_position(config: ModelConfig, n_far: int) -> int:
    """Find a position where a chunk or a temperature begins anew in the middle of the tokens, if the model has such."""
    chunks = [layer.chunk for layer in config.layers if layer.chunk is not None]
    steps = chunks or [config.temperature.floor] if config.temperature is not None else chunks
    return -(-FAR_POSITION // steps[0]) * steps[0] - n_far // 2 if steps else FAR_POSITION


def n_greedy_for(config: ModelConfig, n_prompt: int) -> int:
    """Choose the number of tokens that continue a prompt; the context and the size of the model bound it."""
    n_elements = sum(math.prod(weight.shape) for weight in inventory(config).values())
    wanted = [N_GREEDY, *(n for size, n in N_GREEDY_OF_LARGE.items() if n_elements > size)]
    return min(*wanted, config.max_position_embeddings - n_prompt + 1)


def sampler_inputs(ids: Sequence[int], vocab_size: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Make logits and a history as input of the sampling filters, from a prompt.

    Logits have both signs, and no token dominates: a model that is sure of its next token would hide most mistakes. In
    the history tokens repeat, likely ones too.
    """
    logits = np.random.default_rng(vocab_size).normal(0, 2, vocab_size).astype(np.float32)
    likely = [int(token) for token in np.argsort(-logits)[:4]]
    return logits, (*ids, *ids[:3], *likely, likely[1])


def run_cases(engine: ReferenceEngine, cases: Mapping[str, Pass], *, n_greedy: int = N_GREEDY) -> EngineOutput:
    """Run a reference engine on every case of `cases_for`; `n_greedy` is the length of the greedy continuation."""
    return shown_by(engine, cases, engine.call_batch(calls_for(cases, n_greedy)))


def calls_for(cases: Mapping[str, Pass], n_greedy: int) -> list[Call]:
    """List an engine's calls for every case, for `ReferenceEngine.call_batch`; the first is the greedy continuation."""
    near = cases["near"].ids
    traces: list[Call] = [("trace", (case.ids,), {"first_position": case.first_position}) for case in cases.values()]
    return [("greedy", (near, n_greedy), {}), ("selected_logits", (near,), {}), *traces]


def shown_by(engine: ReferenceEngine, cases: Mapping[str, Pass], answers: Sequence[Any]) -> EngineOutput:
    """Collect the engine output from the answers to `calls_for`, and run the engine's sampling filters."""
    greedy, selected, *traces = answers
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
    """Note in `failed` why an engine cannot run a model, or did not survive it; without it such errors are raised."""
    try:
        yield
    except (ImportError, LookupError, MemoryError, OSError, RuntimeError, ValueError) as error:
        if failed is None:
            raise
        kind = type(error).__name__ if isinstance(error, LookupError) or not str(error) else ""
        failed[name] = " ".join([kind, *str(error).split()]).strip()


def save(folder: Path, golden: Golden) -> None:
    """Write the goldens of one model; the same content gives the same bytes."""
    files = {engine: engine_output.arrays() for engine, engine_output in golden.engine_outputs.items()}
    files[REFERENCE] = golden.reference.engine_output.arrays() | {STEP_LOGITS: golden.reference.step_logits}
    record = ({"cannot_judge": golden.unsupported_reason} if golden.unsupported_reason else {}) | {
        "cases": {name: asdict(case) for name, case in golden.cases.items()},
        "isolated": plain_distances(golden.reference.isolated),
        "provenance": golden.provenance,
        "tensors": golden.tensors,
        "tokens": [asdict(check) for check in golden.tokens],
    }
    GoldenStore(folder).write(record, files)


def read(folder: Path) -> Golden:
    """Read what `save` wrote. A missing golden is a failure, never a pass.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A part of one is missing.
    """
    store = GoldenStore(folder)
    record, unsupported = store.record(), unable_of(folder)
    engines = [name for name in ENGINES if name not in unsupported]
    shown = store.arrays([*engines, REFERENCE])
    _require_whole(store.path, record, engines)
    steps = shown[REFERENCE].pop(STEP_LOGITS)
    load_paths = {name: stored_load_path(record["provenance"], name) for name in shown}
    made = {name: EngineOutput.from_arrays(arrays, load_paths[name]) for name, arrays in shown.items()}
    return Golden(
        reference=ReferenceOutput(made.pop(REFERENCE), steps, read_distances(record["isolated"])),
        cases={name: Pass(tuple(case["ids"]), case["first_position"]) for name, case in record["cases"].items()},
        engine_outputs=made,
        tensors=record["tensors"],
        tokens=[TokenCheck(**check) for check in record["tokens"]],
        provenance=record["provenance"],
        unsupported_reason=unsupported,
    )


def _require_whole(path: Path, record: Mapping[str, Any], engines: Sequence[str]) -> None:
    """Refuse a record that lacks cases, tensors, texts, or the distances of an engine."""
    if record["cases"].keys() != {"near", "far"} or not record["tensors"] or not record["tokens"]:
        n_tensors, n_texts = len(record["tensors"]), len(record["tokens"])
        actual = f"cases {sorted(record['cases'])}, {n_tensors} tensors, {n_texts} texts"
        raise refused(path, f"expected the cases near and far, tensors and tokens, got {actual}")
    distances = record.get("isolated", {})
    if distances.keys() != {*engines}:
        expected = " and ".join(engines)
        raise refused(path, f"expected isolated distances for {expected}, got {sorted(distances) or 'none'}")


def unable_of(folder: Path) -> Mapping[str, str]:
    """Read which reference engines the stored goldens lack, with the reasons.

    Raises:
        FileNotFoundError: There are no goldens.
        ValueError: A reason is not stated, or no reference engine is left.
    """
    store = GoldenStore(folder)
    unsupported = store.record().get("cannot_judge", {})
    if not unsupported.keys() < {*ENGINES} or not all(unsupported.values()):
        wanted = f"expected reasons for some of {' and '.join(ENGINES)} in cannot_judge"
        raise refused(store.path, f"{wanted}, got {unsupported}")
    return unsupported


def require_weights(name: str, weights_sha256: object) -> Path:
    """Return the path of a built-in model; UserError if its goldens were made for other weights."""
    path = builtin_path(name)
    if weights_sha256 != sha256(path):
        raise UserError(f"golden {name}: expected the weights {path}, got others; run reference_outputs/regenerate.py")
    return path


def sha256(path: Path) -> str:
    """Hash of a file's bytes, or of the names and hashes of a folder's files."""
    if path.is_dir():
        files = "".join(f"{file.name} {sha256(file)}\n" for file in sorted(path.iterdir()))
        return hashlib.sha256(files.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
