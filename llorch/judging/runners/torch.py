"""Checkpoint 14: the torch path as runners, on one device and in one dtype, in each way that its modules run.

*Isolated* is a forward pass of these very modules in which the golden takes the place of every stage as soon as it was
recorded. In a batch the judged sequence has a neighbour with other tokens, of another length where the context allows
it, and padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights
from llorch.judging.expert_selection import StageOverride, as_made
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
    """One way to run the modules."""

    make: Callable[[Weights, Target], TorchModel]
    hidden: frozenset[str] | None = SCORES  # stages that its kernels do not show; None: as its attention is compiled
    in_batch: bool = False  # the judged tokens run beside others, with padding


def plain(weights: Weights, target: Target) -> TorchModel:
    """Load the reference implementation as it is written."""
    require_memory(weights, target, "decoded")
    return TorchModel(weights, target, load_dense(weights, dtype=target.dtype, device=target.device))


def with_sdpa(weights: Weights, target: Target) -> TorchModel:
    """Load the reference implementation with fused attention, and nothing else changed."""
    from llorch.pytorch.kernels.sdpa import use_sdpa

    model = plain(weights, target)
    use_sdpa(model.module)
    return model


def loaded(**how: Any) -> Callable[[Weights, Target], TorchModel]:
    """Make a loader that loads as `load_torch` does for users: the fastest kernels, on CUDA with recorded steps."""
    how = {"residency": "decoded"} | how

    def load(weights: Weights, at: Target) -> TorchModel:
        return load_torch(weights.path, device=str(at.device), dtype=at.dtype_name, kernels=at.kernels, **how)

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
    """List the suffixes of variants to judge: compiled on CUDA only, packed if the file has packed matrices."""
    packed = any(kind_of(weights, name) for name in weights)
    left_out = {"-compiled": target.device.type != "cuda", "-packed": not packed}
    return [suffix for suffix in VARIANTS if not left_out.get(suffix, False)]


def torch_runners(target: Target, *, only: Sequence[str] | None = None) -> Callable[..., Iterator["TorchRunner"]]:
    """Return a function that makes the runners of a model, one after the other; `only` are suffixes of `VARIANTS`."""

    def make(weights: Weights, *, wide: bool) -> Iterator[TorchRunner]:
        if wide or target.dtype_name != "float64":
            for suffix in variants_for(target, weights) if only is None else only:
                yield TorchRunner(weights, target, VARIANTS[suffix], f"{target}{suffix}")

    return make


def parallel_runners(target: Target, mesh: DeviceMesh) -> Callable[..., Iterator["TorchRunner"]]:
    """Return a function that makes runners of the reference implementation, split over the ranks that share layers.

    One runner computes prompts alone, and one in a batch. All ranks have to call the same runners.
    """

    def split(weights: Weights, at: Target) -> TorchModel:
        cut = cut_for(weights.config, mesh)
        return ParallelModel(weights, at, load_dense(weights, dtype=at.dtype, device=at.device, cut=cut), mesh)

    def make(weights: Weights, *, wide: bool) -> Iterator[TorchRunner]:
        if wide or target.dtype_name != "float64":
            for suffix, in_batch in (("", False), ("-batch", True)):
                variant = TorchVariant(split, hidden=frozenset(), in_batch=in_batch)
                yield TorchRunner(weights, target, variant, f"{named_on(target, mesh)}{suffix}")

    return make


def _hidden_by(model: TorchModel) -> frozenset[str]:
    """Return the stages that batch-invariant attention does not show: none, unless compiled attention replaced it."""
    kinds = {module.attend for module in model.module.modules() if hasattr(module, "attend")}
    return frozenset() if kinds <= {fixed_attention} else SCORES


class TorchRunner:
    """One variant, loaded."""

    def __init__(self, weights: Weights, target: Target, variant: TorchVariant, name: str) -> None:
        """Load it; ValueError where a parameter is not of the dtype or not on the device of the target."""
        self.name, self.target, self.variant = name, target, variant
        self.dtype: DtypeName = target.dtype_name
        self.model = variant.make(weights, target)
        self.hidden = _hidden_by(self.model) if variant.hidden is None else variant.hidden
        require_target(self.model)
        vars(self.model)["tokenizer"] = IdsOnly()  # also a file without a vocabulary is judged

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return an empty context, because the target sets the arithmetic."""
        return nullcontext()

    def isolated(self, this: Pass, golden: Trace, observe: StageObserver) -> None:
        """Run a pass in which the golden replaces each stage that the variant shows."""
        trace: dict[str, np.ndarray] = {}
        self._observed(this).feed(len(this.ids), trace=trace, golden=golden)
        self._show(trace, observe)

    def chained(
        self, case: str, this: Pass, observe: StageObserver, *, n_cached: int = 0, override: StageOverride = as_made
    ) -> None:
        """Run a pass, or the second of two passes, in a cache that was used before."""
        observed, trace = self._observed(this), dict[str, np.ndarray]()
        if n_cached:
            observed.fill_as_used()
            observed.feed(n_cached, override=override)
        observed.feed(len(this.ids), trace=trace, override=override)
        self._show(trace, observe)

    def in_parts(self, this: Pass, bounds: Sequence[int], observe: Callable[[str, np.ndarray, int], None]) -> None:
        """See `Runner.in_parts`; in a cache that was used before. Parts before the last tokens run unobserved."""
        observed = self._observed(this)
        observed.fill_as_used()
        for stop in bounds[1:]:
            if stop <= len(this.ids) - LAST:
                observed.feed(stop)
                continue
            trace: dict[str, np.ndarray] = {}
            observed.feed(stop, trace=trace)
            self._require_stages(trace)
            for name, array in trace.items():
                observe(name, array, stop)

    def last_row(self, this: Pass, override: StageOverride = as_made) -> np.ndarray:
        """Compute the last row of logits as generation computes it."""
        return self._observed(this).feed(len(this.ids), last_only=True, override=override)[0]

    def probabilities(self, logits: np.ndarray, history: Sequence[int]) -> Mapping[str, np.ndarray]:
        """Compute the distributions; a batch computes all settings at once."""
        groups = [[*SAMPLINGS]] if self.variant.in_batch else [[name] for name in SAMPLINGS]
        return {name: row for names in groups for name, row in self._filtered(names, logits, history)}

    def text(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        """Generate the text as users get it, in a batch together with another prompt."""
        ids = [*prompt]
        prompts = [ids[::-1][:-1], ids] if self.variant.in_batch else [ids]
        made = self.model.generate_batch(prompts, max_tokens=n_tokens, ignore_eos=True)
        return np.asarray([token.id for row, token in made if row == len(prompts) - 1], np.int64)

    def _observed(self, this: Pass) -> ObservedCase:
        return ObservedCase(self.model, this, in_batch=self.variant.in_batch)

    def _show(self, trace: Trace, observe: StageObserver) -> None:
        self._require_stages(trace)
        for name, array in trace.items():
            observe(name, array)

    def _require_stages(self, trace: Trace) -> None:
        expected = {key for key, stage, _ in keys(self.model.config) if stage.name not in self.hidden}
        wrong = sorted(expected ^ trace.keys())
        if wrong:
            message = f"expected exactly its {len(expected)} stages; missing or unknown: {', '.join(wrong[:5])}"
            raise CheckpointMismatch(f"{self.model.name}: {self.name}: {message}")

    @torch.inference_mode()
    def _filtered(
        self, names: Sequence[str], logits: np.ndarray, history: Sequence[int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the distributions of some settings, computed as rows of one batch."""
        settings, device = [SAMPLINGS[name] for name in names], self.target.device
        seen = torch.from_numpy(seen_tokens([history] * len(names), logits.size)).to(device)
        dtype = torch.promote_types(self.target.dtype, torch.float32)  # as the model makes its logits
        rows = torch.from_numpy(logits).to(device, dtype).expand(len(names), -1)
        counts = torch.zeros(seen.shape, dtype=torch.int64, device=device)
        made = probabilities(rows, BatchSettings.of(settings, device), Needs.of(settings), seen, counts)
        return zip(names, as_numpy(made), strict=True)


def require_target(model: TorchModel) -> None:
    """Refuse a model with a parameter of another dtype or on another device than its target says (ValueError)."""
    expected = f"{model.target.dtype} on {model.target.device}"
    for name, parameter in model.module.named_parameters():
        if (parameter.dtype, parameter.device) != (model.target.dtype, model.target.device):
            actual = f"{parameter.dtype} on {parameter.device}"
            raise ValueError(f"{name}: expected {expected} for {model.target}, got {actual}")
