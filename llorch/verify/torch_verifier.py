"""Checkpoint 14: checkpoints 00 to 12 again on the torch path, on one device and in one dtype, as its modules run.

Truth, goldens and comparison are those of `verifier`; only what is ours is computed by the modules. *Isolated*
is a forward pass of these very modules in which the golden takes the place of every stage as soon as it was recorded.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import numpy as np
import torch

from llorch.errors import CheckpointMismatch
from llorch.files import Weights
from llorch.generate import IdsOnly
from llorch.numerics import DtypeName
from llorch.pytorch.device import Target
from llorch.pytorch.model import TorchModel, as_numpy
from llorch.pytorch.sampling import BatchSettings, Needs, probabilities, seen_tokens
from llorch.stages import Stage
from llorch.verify.compare import Tolerance
from llorch.verify.goldens import HALF_DTYPES, SAMPLINGS, Evidence, Tolerances, Truth, sampler_inputs
from llorch.verify.half import half_ceiling
from llorch.verify.replay import Pass
from llorch.verify.torch_observed import ObservedCase, Trace
from llorch.verify.torch_variants import VARIANTS, Variant
from llorch.verify.truth import ATTENTION, SCORES, WITNESS
from llorch.verify.verifier import Row, Verifier


class TorchVerifier(Verifier):
    """Judges one variant of the torch path; `on` chooses which.

    Attributes:
        target: Device and dtype that are judged.
        half: The dtype, when it is one of half precision.
        variant: How the modules run.
        model: They.
    """

    variant: Variant
    model: TorchModel

    def __init__(
        self,
        name: str,
        weights: Weights,
        cases: Mapping[str, Pass],
        evidence: Mapping[str, Evidence],
        truth: Truth | None,
        target: Target,
    ) -> None:
        """Prepare; nothing is loaded before `on`.

        Args:
            name: Name of the model in the rows.
            weights: The model in float32, from which all variants are loaded.
            cases: The inputs.
            evidence: What each producer showed for them.
            truth: What float64 shows for them; a run in float64 is judged by it alone.
            target: Device and dtype that are judged.

        Raises:
            ValueError: A trace has not exactly the stages of the model.
        """
        super().__init__(name, weights, cases, evidence, truth)
        self.target = target
        if target.dtype_name == "float64":
            self.evidence = {WITNESS: truth.evidence} if truth is not None else {}
        self.half: DtypeName | None = next((d for d in HALF_DTYPES if d == target.dtype_name), None)

    def on(self, backend: str) -> "TorchVerifier":
        """The same verifier with one variant loaded; the truth is computed once for all.

        Args:
            backend: One of `backends`.

        Returns:
            It.
        """
        return self.judging(VARIANTS[backend.removeprefix(str(self.target))], backend)

    def judging(self, variant: Variant, backend: str) -> "TorchVerifier":
        """The same verifier for any variant.

        Args:
            variant: Loaded now.
            backend: Its name in the rows.

        Returns:
            It.

        Raises:
            ValueError: A parameter is not of the dtype or not on the device of the target.
        """
        other = copy(self)
        other.backend, other.variant = backend, variant
        other.model = variant.make(self.weights, self.target)
        other._isolated_traces = {}
        require_target(other.model)
        vars(other.model)["tokenizer"] = IdsOnly()  # also a file without a vocabulary is judged
        return other

    def stage_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 00 to 08; attention that shows no scores is one op, with a tolerance of its own."""
        if SCORES <= self.variant.hidden:
            tolerances = {
                case: modes | {"isolated": modes["isolated"] | {"attn_context": modes["isolated"][ATTENTION]}}
                for case, modes in tolerances.items()
                if case in self.cases
            }
        return super().stage_rows(tolerances)

    def ceiling_of(self, case: str, mode: str, stage: str) -> Tolerance:
        """The largest tolerance that is ever granted to a stage."""
        if self.half is None or stage == "probabilities":  # made from float32 logits in every run
            return super().ceiling_of(case, mode, stage)
        return half_ceiling(self.weights.config, self.cases[case], mode, self.half)

    def _allowed(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        granted = super()._allowed if self.half is None else self._capped
        return granted(made, case, mode, stage)

    def _capped(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        if self.half is None:
            return super()._capped(made, case, mode, stage)
        return made.at_most(self.ceiling_of(case, mode, stage))

    @property
    def _shown(self) -> Sequence[tuple[str, Stage, int | None]]:
        """The stages that the variant has."""
        return [shown for shown in self._keys if shown[1].name not in self.variant.hidden]

    def _observed(self, case: str) -> ObservedCase:
        return ObservedCase(self.model, self.cases[case], in_batch=self.variant.in_batch)

    def _run(self, weights: Weights, case: str, *, n_cached: int = 0) -> Trace:
        """Ours; of the second of two passes in a cache that was used before, when there are two."""
        observed, trace = self._observed(case), {}
        if n_cached:
            observed.warm_up()
            observed.feed(n_cached)
        observed.feed(len(self.cases[case].ids), trace=trace)
        return self._complete(trace)

    def _run_isolated(self, case: str, golden: Mapping[str, np.ndarray]) -> Trace:
        trace: Trace = {}
        self._observed(case).feed(len(self.cases[case].ids), trace=trace, golden=golden)
        return self._complete(trace)

    def _isolated_error(self, producer: str, case: str, key: str) -> float:
        fused = key.endswith("attn_context") and self.variant.hidden >= SCORES
        return super()._isolated_error(producer, case, key.replace("attn_context", ATTENTION) if fused else key)

    def _complete(self, trace: Trace) -> Trace:
        expected = {key for key, _, _ in self._shown}
        wrong = sorted(expected ^ trace.keys())
        if wrong:
            raise CheckpointMismatch(
                f"{self.name}: {self.backend} must show its {len(expected)} stages and no others; "
                f"missing or unknown: {', '.join(wrong[:5])}"
            )
        return trace

    def _last_row(self) -> np.ndarray:
        return self._observed("near").feed(len(self.cases["near"].ids), last_only=True)[0]

    def _probabilities(self) -> dict[str, np.ndarray]:
        logits, history = sampler_inputs(self.cases["near"].ids, self.weights.config.vocab_size)
        groups = [[*SAMPLINGS]] if self.variant.in_batch else [[name] for name in SAMPLINGS]
        return {name: row for names in groups for name, row in self._filtered(names, logits, history)}

    @torch.inference_mode()
    def _filtered(
        self, names: Sequence[str], logits: np.ndarray, history: Sequence[int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Distributions of some settings, as rows of one batch."""
        settings, device = [SAMPLINGS[name] for name in names], self.target.device
        seen = torch.from_numpy(seen_tokens([history] * len(names), logits.size)).to(device)
        dtype = torch.promote_types(self.target.dtype, torch.float32)  # as the model makes its logits
        rows = torch.from_numpy(logits).to(device, dtype).expand(len(names), -1)
        made = probabilities(rows, BatchSettings.of(settings, device), Needs.of(settings), seen)
        return zip(names, as_numpy(made), strict=True)

    def _text(self, after: Sequence[int], n_tokens: int) -> np.ndarray:
        """The greedy text as users get it, in a batch beside another."""
        ids = [*self.cases["near"].ids, *after]
        prompts = [ids[::-1][:-1], ids] if self.variant.in_batch else [ids]
        made = self.model.generate_batch(prompts, max_tokens=n_tokens, ignore_eos=True)
        return np.asarray([token.id for row, token in made if row == len(prompts) - 1], np.int64)

    def _moved_by_rounding(self, n_after: int) -> float:
        """As there; in half precision every stage rounds."""
        if self.half is None:
            return super()._moved_by_rounding(n_after)
        return half_ceiling(self.weights.config, self.cases["near"], "chained", self.half).error


def require_target(model: TorchModel) -> None:
    """Refuse a model whose parameters are not what its target says.

    Args:
        model: Loaded.

    Raises:
        ValueError: A parameter is of another dtype or on another device.
    """
    for name, parameter in model.module.named_parameters():
        if (parameter.dtype, parameter.device) != (model.target.dtype, model.target.device):
            raise ValueError(
                f"{name}: expected {model.target.dtype} on {model.target.device} for {model.target}, "
                f"got {parameter.dtype} on {parameter.device}"
            )
