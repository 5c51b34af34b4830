"""Runners of the torch path (validation point 14) on one device and in one dtype, in every execution mode.

An *isolated* run is a forward pass in which the golden replaces every stage as soon as it is recorded, a *chained* run
reads the results of earlier stages. In a batch, the observed sequence has padding and a second sequence with other
tokens. The second sequence has another length if the context allows it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights
from llorch.judging.expert_selection import StageOverride, identity
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.judging.goldens.long_contexts import LAST
from llorch.judging.runners import StageObserver, Trace
from llorch.judging.runners.torch_observed import ObservedCase
from llorch.judging.tolerances.forward import SCORES
from llorch.model.generate import IdsOnly
from llorch.ops.numerics import DtypeName
from llorch.pytorch.batch_invariant.reproducible import attention as fixed_attention
from llorch.pytorch.device import Target
from llorch.pytorch.distributed.launch import named_on
from llorch.pytorch.distributed.parallel_model import ParallelModel
from llorch.pytorch.distributed.sharding_plan import cut_for
from llorch.pytorch.load import load_dense
from llorch.pytorch.memory import require_memory
from llorch.pytorch.model import TorchModel, as_numpy, load_torch
from llorch.pytorch.sampling import BatchSettings, Needs, probabilities, seen_tokens
from llorch.pytorch.stored_kinds import kind_of
from llorch.runtime.errors import CheckpointMismatch
from llorch.stages.stage_ref import Pass
from llorch.stages.table import keys


@dataclass(frozen=True)
class TorchVariant:
    """One execution mode of the modules."""

    make: Callable[[Weights, Target], TorchModel]
    hidden: frozenset[str] | None = SCORES  # stages that the kernels do not expose; None: see `_hidden_stages`
    in_batch: bool = False  # True: the observed tokens run in a batch with a second sequence and padding


def plain(weights: Weights, target: Target) -> TorchModel:
    """Load llorch's torch modules without faster kernels."""
    require_memory(weights, target, "decoded")
    return TorchModel(weights, target, load_dense(weights, dtype=target.dtype, device=target.device))


def with_sdpa(weights: Weights, target: Target) -> TorchModel:
    """Load the modules of `plain` with fused attention as the only kernel."""
    from llorch.pytorch.kernels.sdpa import use_sdpa

    model = plain(weights, target)
    use_sdpa(model.module)
    return model


def loaded(**options: Any) -> Callable[[Weights, Target], TorchModel]:
    """Return a loader that calls `load_torch` as users do: the fastest kernels, and CUDA graphs on CUDA."""
    options = {"residency": "decoded"} | options

    def load(weights: Weights, target: Target) -> TorchModel:
        return load_torch(
            weights.path, device=str(target.device), dtype=target.dtype_name, kernels=target.kernels, **options
        )

    return load


VARIANTS: Mapping[str, TorchVariant] = {  # suffix of the backend's name
    "": TorchVariant(plain, hidden=frozenset()),
    "-batch": TorchVariant(plain, hidden=frozenset(), in_batch=True),
    "-sdpa": TorchVariant(with_sdpa),
    "-sdpa-batch": TorchVariant(with_sdpa, in_batch=True),
    "-fast": TorchVariant(loaded()),
    "-fast-batch": TorchVariant(loaded(), in_batch=True),
    "-reproducible": TorchVariant(loaded(mode="reproducible"), hidden=None),
    "-compiled": TorchVariant(loaded(compiled=True)),
    "-packed": TorchVariant(loaded(residency="packed")),
}


def variants_for(target: Target, weights: Weights) -> list[str]:
    """List the suffixes of the variants to verify: compiled only on CUDA, packed only for files of packed matrices."""
    has_packed = any(kind_of(weights, name, target.device.type) for name in weights)
    is_skipped = {"-compiled": target.device.type != "cuda", "-packed": not has_packed}
    return [suffix for suffix in VARIANTS if not is_skipped.get(suffix, False)]


def torch_runners(target: Target, *, only: Sequence[str] | None = None) -> Callable[..., Iterator["TorchRunner"]]:
    """Return a function that yields a model's runners (in float64 only with a reference); `only` selects variants."""

    def make(weights: Weights, *, has_reference: bool) -> Iterator[TorchRunner]:
        if has_reference or target.dtype_name != "float64":
            for suffix in variants_for(target, weights) if only is None else only:
                yield TorchRunner(weights, target, VARIANTS[suffix], f"{target}{suffix}")

    return make


def parallel_runners(target: Target, mesh: DeviceMesh) -> Callable[..., Iterator["TorchRunner"]]:
    """Return a function like that of `torch_runners`, for the modules of `plain` with tensor parallelism.

    It yields one runner for single prompts and one for batches. All ranks must call the same runners.
    """

    def split(weights: Weights, target: Target) -> TorchModel:
        cut = cut_for(weights.config, mesh)
        return ParallelModel(
            weights, target, load_dense(weights, dtype=target.dtype, device=target.device, cut=cut), mesh
        )

    def make(weights: Weights, *, has_reference: bool) -> Iterator[TorchRunner]:
        if has_reference or target.dtype_name != "float64":
            for suffix, in_batch in (("", False), ("-batch", True)):
                variant = TorchVariant(split, hidden=frozenset(), in_batch=in_batch)
                yield TorchRunner(weights, target, variant, f"{named_on(target, mesh)}{suffix}")

    return make


def _hidden_stages(model: TorchModel) -> frozenset[str]:
    """Return the stages that the model hides: none with batch-invariant attention, scores if it is compiled."""
    kinds = {module.attend for module in model.module.modules() if hasattr(module, "attend")}
    return frozenset() if kinds <= {fixed_attention} else SCORES


class TorchRunner:
    """Runner of one loaded variant."""

    def __init__(self, weights: Weights, target: Target, variant: TorchVariant, name: str) -> None:
        """Load the variant; raise ValueError (a bug) if a parameter has another dtype or device than the target."""
        self.name, self.target, self.variant = name, target, variant
        self.dtype: DtypeName = target.dtype_name
        self.model = variant.make(weights, target)
        self.hidden = _hidden_stages(self.model) if variant.hidden is None else variant.hidden
        self._exposed = {key for key, stage, _ in keys(weights.config) if stage.name not in self.hidden}
        require_target(self.model)
        vars(self.model)["tokenizer"] = IdsOnly()  # so that files without a vocabulary work

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return an empty context, because the target sets the arithmetic."""
        return nullcontext()

    def isolated(self, inputs: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass in which the golden replaces each stage that the variant exposes."""
        trace: dict[str, np.ndarray] = {}
        self._observed(inputs).feed(len(inputs.ids), trace=trace, golden=golden)
        self._show(trace, observe)

    def chained(
        self, case: str, inputs: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = identity
    ) -> None:
        """Run a pass; with `n_cached`, run prefill and decode in a cache that was used before."""
        observed, trace = self._observed(inputs), dict[str, np.ndarray]()
        if n_cached:
            observed.fill_and_clear()
            observed.feed(n_cached, override=override)
        observed.feed(len(inputs.ids), trace=trace, override=override)
        self._show(trace, observe)

    def in_chunks(self, inputs: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        """Run chunks on a cache that was used before; observe only those with some of the last `LAST` tokens."""
        observed = self._observed(inputs)
        observed.fill_and_clear()
        for stop in bounds[1:]:
            if stop <= len(inputs.ids) - LAST:
                observed.feed(stop)
                continue
            trace: dict[str, np.ndarray] = {}
            observed.feed(stop, trace=trace, n_traced=LAST)
            self._require_stages(trace)
            for name, array in trace.items():
                observe(name, array, stop)

    def last_row(self, inputs: Pass, override: StageOverride = identity) -> np.ndarray:
        """Compute the logits of the last token as generation does."""
        return self._observed(inputs).feed(len(inputs.ids), last_only=True, override=override)[0]

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Compute the sampling distributions of `SAMPLINGS`; a batch computes all settings at once."""
        groups = [[*SAMPLINGS]] if self.variant.in_batch else [[name] for name in SAMPLINGS]
        return {name: row for names in groups for name, row in self._filter(names, logits, history)}

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the text as users get it; in a batch, together with another prompt."""
        ids = [*prompt]
        prompts = [ids[::-1][:-1], ids] if self.variant.in_batch else [ids]
        generated = self.model.generate_batch(prompts, max_tokens=n_tokens, ignore_eos=True)
        return np.asarray([token.id for row, token in generated if row == len(prompts) - 1], np.int64)

    def _observed(self, inputs: Pass) -> ObservedCase:
        return ObservedCase(self.model, inputs, in_batch=self.variant.in_batch)

    def _show(self, trace: Trace, observe: StageObserver) -> None:
        self._require_stages(trace)
        for name, array in trace.items():
            observe(name, array)

    def _require_stages(self, trace: Trace) -> None:
        """Raise CheckpointMismatch if a trace lacks a stage, or has one that the variant is expected to hide."""
        wrong = sorted(self._exposed ^ trace.keys())
        if wrong:
            message = f"expected exactly its {len(self._exposed)} stages; missing or unknown: {', '.join(wrong[:5])}"
            raise CheckpointMismatch(f"{self.model.name}: {self.name}: {message}")

    @torch.inference_mode()
    def _filter(
        self, names: Sequence[str], logits: np.ndarray, history: Sequence[int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the distributions of some settings, computed as rows of one batch."""
        settings, device = [SAMPLINGS[name] for name in names], self.target.device
        seen_ids = torch.from_numpy(seen_tokens([history] * len(names), logits.size)).to(device)
        dtype = torch.promote_types(self.target.dtype, torch.float32)  # dtype of the model's logits
        logit_rows = torch.from_numpy(logits).to(device, dtype).expand(len(names), -1)
        counts = torch.zeros(seen_ids.shape, dtype=torch.int64, device=device)
        filtered = probabilities(logit_rows, BatchSettings.of(settings, device), Needs.of(settings), seen_ids, counts)
        return zip(names, as_numpy(filtered), strict=True)


def require_target(model: TorchModel) -> None:
    """Raise ValueError, because it is a bug of llorch, if a parameter has another dtype or device than the target."""
    expected = f"{model.target.dtype} on {model.target.device}"
    for name, parameter in model.module.named_parameters():
        if (parameter.dtype, parameter.device) != (model.target.dtype, model.target.device):
            actual = f"{parameter.dtype} on {parameter.device}"
            raise ValueError(f"{name}: expected {expected} for {model.target}, got {actual}")
