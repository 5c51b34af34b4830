"""Interface of all reference engines, their common checks, and the models that an engine cannot check.

A reference engine is independent code that runs the model, and to whose stages (named intermediate arrays, see
`stages.table`) llorch's are compared. llama.cpp deviates from some configurations; transformers then checks llorch.
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
Call = tuple[str, Sequence, Mapping]  # method, arguments, keyword arguments
OURS = "llorch"  # name in load paths of steps that llorch did


@dataclass(frozen=True)
class LoadPath:
    """Tools that read, decoded and rewrote the model before the engine loaded it.

    The engine does not check steps that llorch did.

    Attributes:
        read: Tool that read the tensor table and the hyperparameters, except `set_by_llorch`.
        decoded: Tool that decoded the tensors.
        written: Tool that wrote the file that the engine loaded; empty if the engine loaded the original file.
        set_by_llorch: Hyperparameters, by the engine's names, that only llorch could read from the file.
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
        """Return the record for goldens (stored reference outputs)."""
        return {"read": self.read, "decoded": self.decoded, "written": self.written, "told": self.set_by_llorch}


def stored_load_path(provenance: Mapping[str, Any], engine: str) -> LoadPath:
    """Read the load path of an engine from the provenance of goldens; raise UserError if it is missing."""
    values = provenance["engines"].get(engine, {}).get("route")
    if values is None:
        raise UserError(f"golden: expected the load path of {engine}, got none; run reference_outputs/regenerate.py")
    return LoadPath(values["read"], values["decoded"], values["written"], tuple(values["told"]))


@runtime_checkable
class ReferenceEngine(Protocol):
    """Interface of a reference engine; a context manager that frees the model."""

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
        """Run tokens from an empty cache and return every stage by key, like `l0.q_rope`, as `checked_trace`."""
        ...

    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token, from a run without capture."""
        ...

    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits of the last token that the engine's sampler reads."""
        ...

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Generate `n` tokens greedily with the engine's decode loop and cache."""
        ...

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution after the engine's sampling filters; 0 for removed tokens."""
        ...

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call.

        An engine that streams a model reads each layer once for all calls.
        """
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of the engine's tokenizer; None if the model has no tokenizer."""
        ...

    def provenance(self) -> dict[str, object]:
        """Return the versions, build, CPU features and settings of the engine."""
        ...


def call_each(engine: object, calls: Sequence[Call]) -> list[Any]:
    """Implement `call_batch` by single calls, for an engine that holds the whole model."""
    return [getattr(engine, method)(*args, **kwargs) for method, args, kwargs in calls]


Trace = dict[str, np.ndarray]


def checked_trace(
    captured: Mapping[str, np.ndarray],
    config: ModelConfig,
    n_tokens: int,
    engine: str,
    dtype: type[np.floating] = np.float32,
) -> Trace:
    """Check and return the captured stages of a run from an empty cache; raise RuntimeError if any stage is wrong."""
    shapes = {key: stage.shape(config, seq=n_tokens, ctx=n_tokens) for key, stage, _ in stages.keys(config)}
    dtypes = {key: np.int64 if stage.is_selection else dtype for key, stage, _ in stages.keys(config)}
    faults = [f"{name} is missing" for name in shapes if name not in captured]
    faults += [f"{name} is unexpected" for name in captured if name not in shapes]
    for name, array in captured.items():
        if name in shapes and (array.shape != shapes[name] or array.dtype != dtypes[name]):
            faults.append(f"{name} must be {np.dtype(dtypes[name])} {shapes[name]}, got {array.dtype} {array.shape}")
    if faults:
        raise RuntimeError(f"{engine}: the captured stages are not the expected stages: {'; '.join(faults)}")
    return {name: np.ascontiguousarray(captured[name]) for name in shapes}


def check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    """Raise UserError if there are no token ids, or if one is not in the vocabulary."""
    bad_index = next((index for index, token in enumerate(ids) if not 0 <= token < config.vocab_size), None)
    if not ids or bad_index is not None:
        actual = "none" if bad_index is None else f"{ids[bad_index]} at index {bad_index}"
        raise UserError(f"ids: expected at least one token id, each from 0 to {config.vocab_size - 1}, got {actual}")


def unsupported_reason(engine: str, config: ModelConfig, n_tokens: int) -> str:
    """Return the reason why an engine cannot check runs of up to `n_tokens` tokens of a model; empty if it can."""
    if engine != "llamacpp":
        return ""
    if config.delta_net is not None and np.float32(config.rms_norm_eps) != np.float32(L2_EPS):  # llama.cpp#28068
        eps = shortest(config.rms_norm_eps)
        return f"llama.cpp uses rms_norm_eps for the L2 norms of delta nets, too: {eps}, not {L2_EPS}"
    if not FAMILIES[config.family].llamacpp.reads_epsilon:  # a llama.cpp bug: later versions read the key
        gguf = FAMILIES[config.family].gguf
        return f"llama.cpp does not read {EPSILON} for {gguf}, so its norms use an epsilon of 0"
    if pairs := unrotated_pairs(config):  # a llama.cpp bug: transformers rotates them, as in training
        sections, pair_list = (", ".join(map(str, numbers)) for numbers in (config.rope_sections, pairs))
        return f"llama.cpp does not rotate pairs {pair_list} of a head in a text: rope.dimension_sections is {sections}"
    return cannot_express(config, n_tokens)


def not_a_number(engine: str, family: str, stage: str) -> str:
    """Explain a known NaN of an engine in a stage, as the end of an error message; empty if there is none."""
    divides = FAMILIES[family].llamacpp.nodes.get("shared_gate", ("", ""))[0] == "DIV"
    if (engine, stage) == ("llamacpp", "shared_gate") and divides:
        return "; llama.cpp computes sigmoid(x) as silu(x) / x, and x is 0 for one token"
    return ""


def unrotated_pairs(config: ModelConfig) -> list[int]:
    """List the RoPE pairs that llama.cpp gives to a fourth position component, which is 0 for every text token.

    Source: ggml `ops.cpp`, `ggml_mrope_cache_init`; llama.cpp `llama-graph.cpp`, `llm_graph_input_pos::set_input`.
    """
    if not (sections := config.rope_sections):
        return []
    # `sections` counts the pairs of each component: in blocks, or (interleaved) in turn until a component has all.
    period, is_interleaved = sum(sections), FAMILIES[config.family].sections == "interleaved"
    ends = [3 * end for end in sections[:3]] if is_interleaved else [sum(sections[:3])] * 3
    return [pair for pair in range(config.rotated // 2) if pair % period >= ends[pair % period % 3]]
