"""The interface of every reference engine, the checks that all of them share, and what an engine cannot check.

llama.cpp reads some configurations and computes something else: llorch computes what the configuration says, and the
other engine gives the verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.family import EPSILON
from llorch.families.llamacpp_limits import cannot_express
from llorch.families.table import FAMILIES
from llorch.ops.delta_rule import L2_EPS
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import UserError
from llorch.runtime.fields import shortest
from llorch.stages import table as stages

EngineName = Literal["llamacpp", "transformers"]
Call = tuple[str, Sequence, Mapping]  # a method, its arguments, and those that have names
OURS = "llorch"  # in routes


@dataclass(frozen=True)
class LoadPath:
    """Tools that read, decoded and rewrote the model before the engine loaded it.

    The engine does not check steps that llorch did.

    Attributes:
        read: Who found the tensors in the file, and the hyperparameters but those in `set_by_llorch`.
        decoded: Who made numbers of them.
        written: Who wrote what the engine loaded instead; empty where that was the file itself.
        set_by_llorch: Hyperparameters, by the engine's names, that it did not find in the file: llorch read them.
    """

    read: str
    decoded: str
    written: str = ""
    set_by_llorch: tuple[str, ...] = ()

    @property
    def is_direct(self) -> bool:
        """True if the engine itself read everything from the file."""
        return not self.written and not self.set_by_llorch and self.read == self.decoded != OURS

    def __str__(self) -> str:
        read = "read and decoded" if self.read == self.decoded else f"read by {self.read}, decoded"
        written = f", written by {self.written}" if self.written else ""
        from_llorch = f", {' and '.join(self.set_by_llorch)} read by {OURS}" if self.set_by_llorch else ""
        return f"{read} by {self.decoded}{written}{from_llorch}"

    def stored(self) -> dict[str, object]:
        """Return the values as goldens store them."""
        return {"read": self.read, "decoded": self.decoded, "written": self.written, "told": self.set_by_llorch}


def stored_load_path(provenance: Mapping[str, Any], engine: str) -> LoadPath:
    """Read the load path that goldens state for an engine; raise ValueError if they state none."""
    values = provenance["engines"].get(engine, {}).get("route")
    if values is None:
        raise UserError(f"golden: expected the load path of {engine}, got none; run reference_outputs/regenerate.py")
    return LoadPath(values["read"], values["decoded"], values["written"], tuple(values["told"]))


@runtime_checkable
class ReferenceEngine(Protocol):
    """What every engine can be asked; a context manager that frees the model."""

    name: str
    config: ModelConfig
    n_threads: int
    load_path: LoadPath

    def __enter__(self) -> "ReferenceEngine": ...

    def __exit__(self, *exception: object) -> None: ...

    def close(self) -> None:
        """Free the model."""
        ...

    def trace(self, ids: Sequence[int], *, first_position: int = 0) -> dict[str, np.ndarray]:
        """Run tokens from an empty cache and return every stage, float32 and C-contiguous."""
        ...

    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token, from a run without capture."""
        ...

    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the row of logits that the engine's own sampling sees for the last token."""
        ...

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Generate `n` tokens greedily by the engine's own code, with the engine's own cache."""
        ...

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution after the engine's own sampling filters; 0 for removed tokens."""
        ...

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Answer each of these calls.

        An engine that reads a model layer by layer reads each layer once for all of them.
        """
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of the engine's own tokenizer, None when the model comes without one."""
        ...

    def provenance(self) -> dict[str, object]:
        """Return the versions, build, CPU features and switches of the engine."""
        ...


def one_by_one(engine: object, calls: Sequence[Call]) -> list[Any]:
    """Run calls one after the other, for an engine that holds its whole model; see `call_batch`."""
    return [getattr(engine, method)(*args, **kwargs) for method, args, kwargs in calls]


Trace = dict[str, np.ndarray]


def checked_trace(
    captured: Mapping[str, np.ndarray],
    config: ModelConfig,
    n_tokens: int,
    engine: str,
    dtype: type[np.floating] = np.float32,
) -> Trace:
    """Refuse a capture, of a run from an empty cache, that is not exactly the expected set of stages."""
    shapes = {key: stage.shape(config, seq=n_tokens, ctx=n_tokens) for key, stage, _ in stages.keys(config)}
    dtypes = {key: np.int64 if stage.is_choice else dtype for key, stage, _ in stages.keys(config)}
    faults = [f"{name} is missing" for name in shapes if name not in captured]
    faults += [f"{name} is unexpected" for name in captured if name not in shapes]
    for name, array in captured.items():
        if name in shapes and (array.shape != shapes[name] or array.dtype != dtypes[name]):
            faults.append(f"{name} must be {np.dtype(dtypes[name])} {shapes[name]}, got {array.dtype} {array.shape}")
    if faults:
        raise RuntimeError(f"{engine}: the captured stages are not the expected stages: {'; '.join(faults)}")
    return {name: np.ascontiguousarray(captured[name]) for name in shapes}


def check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    """Refuse token ids that the model does not have."""
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < config.vocab_size), None)
    if not ids or wrong is not None:
        actual = "none" if wrong is None else f"{ids[wrong]} at index {wrong}"
        raise UserError(f"ids: expected at least one token id, each from 0 to {config.vocab_size - 1}, got {actual}")


def unsupported_reason(engine: str, config: ModelConfig, n_tokens: int) -> str:
    """Explain why an engine cannot judge runs of up to so many tokens; empty if it can."""
    if engine != "llamacpp":
        return ""
    if config.delta_net is not None and np.float32(config.rms_norm_eps) != np.float32(L2_EPS):  # llama.cpp#28068
        eps = shortest(config.rms_norm_eps)
        return f"llama.cpp uses rms_norm_eps for the L2 norms of delta nets, too: {eps}, not {L2_EPS}"
    if not FAMILIES[config.family].llamacpp.reads_epsilon:  # a fault: a later version of its file reads the key
        gguf = FAMILIES[config.family].gguf
        return f"llama.cpp does not read {EPSILON} for {gguf}, so its norms use an epsilon of 0"
    if pairs := unturned(config):  # a fault: transformers turns them, and models that see are trained with it
        sections, left = (", ".join(map(str, listed)) for listed in (config.rope_sections, pairs))
        return f"llama.cpp does not rotate pairs {left} of a head in a text: rope.dimension_sections is {sections}"
    return cannot_express(config, n_tokens)


def not_a_number(engine: str, family: str, stage: str) -> str:
    """Explain a known NaN of an engine in a stage, as the end of a message; empty if none is known."""
    divides = FAMILIES[family].llamacpp.nodes.get("shared_gate", ("", ""))[0] == "DIV"
    if (engine, stage) == ("llamacpp", "shared_gate") and divides:
        return "; llama.cpp computes sigmoid(x) as silu(x) / x, and x is 0 for one token"
    return ""


def unturned(config: ModelConfig) -> list[int]:
    """List the pairs of a head that llama.cpp puts on a fourth axis, on which every token of a text has position 0.

    Source: ggml `ops.cpp`, `ggml_mrope_cache_init`; llama.cpp `llama-graph.cpp`, `llm_graph_input_pos::set_input`.
    """
    if not (sections := config.rope_sections):
        return []
    period, mixed = sum(sections), FAMILIES[config.family].sections == "interleaved"
    ends = [3 * end for end in sections[:3]] if mixed else [sum(sections[:3])] * 3
    return [i for i in range(config.rotated // 2) if i % period >= ends[i % period % 3]]
