"""The table of fault injection: every fault in running code, its backend and model, and the check that must see it.

Mistakes in the inputs of a golden have a table of their own in the library, `STAGE_MISTAKES` and the others beside it:
`situations.py` finds their places. No row imports torch.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from faults.fault import ANY, TRAINER, Check, InjectedFault
from faults.situations import training_models_of
from llorch.diagnosis.mistakes import MISTAKES, TRAINING
from llorch.diagnosis.mistakes.variants import VISIBLE
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.judging.goldens.training import MODELS
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import PASS

OPS = (
    "embedding-ids-off-by-one", "norm-gain-missing", "rope-interleaved-pairs", "softmax-not-divided",
    "groups-tiled-for-values", "swiglu-silu-on-up",
)  # fmt: skip
PRODUCTS = frozenset({"q_proj", "k_proj", "v_proj", "attn_out", "ffn_gate", "ffn_up", "ffn_out"})
BOTH_ENGINES = frozenset({"llamacpp", "transformers"})
ALL_RIGHT = Check(others=frozenset({PASS}))
SMALLEST = MODELS[-1]  # of those with training goldens: the one of the fewer layers
LEAST = 1e5  # times the tolerance of float64, by one part in a million


def _op(name: str, checkpoint: str, *stages: str) -> InjectedFault:
    """An op of the forward pass that is wrong: it fails alone at its stages, and first at its checkpoint."""
    check = Check((checkpoint, stages[0]), "chained", red={"isolated": stages})
    return InjectedFault(name, "numpy", "micro-qwen2", check)


def _library_op(name: str) -> InjectedFault:
    """A mistake of the library in an op; Qwen2 has no norms of heads."""
    stages = [stage for stage in MISTAKES[name].stages if stage not in ("q_norm", "k_norm")]
    return _op(name, MISTAKES[name].checkpoints[0], *stages)


def _after_a_cache(name: str, first: str, *isolated_stages: str) -> InjectedFault:
    """A fault that shows after cached tokens: one pass over all tokens is right, but for `alone`."""
    red: Mapping[str, Collection[str]] = {"isolated": isolated_stages} | ({} if isolated_stages else {"chained": ()})
    check = Check(("03", first, 0), red=red)
    return InjectedFault(name, "numpy", "micro-qwen2", check, rows="decode_rows stage_rows")


def _sampling(
    name: str, first: tuple[str, str], *red: str, other_verdicts: Collection[str] | None = None
) -> InjectedFault:
    check = Check(first, red={ANY: red}, others=other_verdicts if other_verdicts is None else frozenset(other_verdicts))
    return InjectedFault(name, "numpy", "micro-qwen2", check, rows="sampler_rows")


NUMPY = (
    InjectedFault("none", "numpy", "micro-qwen2", Check(), rows="decode_rows stage_rows sampler_rows"),
    *map(_library_op, OPS),
    _op("bias missing", "02", "q_proj", "k_proj", "v_proj"),
    _op("scores not masked", "04", "attn_scores"),
    _after_a_cache("positions from 0 after a cache", "q_rope"),
    _after_a_cache("cache forgets earlier keys", "k_cache"),
    _after_a_cache("cache of zeros", "k_cache", "k_cache", "v_cache"),
    _after_a_cache("context lost after a cache", "attn_context"),
    _sampling("token after the best one", ("12", "generation"), "generation", other_verdicts={PASS}),
    _sampling(
        "filters ignored",
        ("11", next(f"probabilities.{name}" for name in SAMPLINGS if name != "temperature")),
        *(f"probabilities.{name}" for name in SAMPLINGS if name != "temperature"),
    ),
)

IN_FLOAT64 = {  # and the stages that fail where each op stands alone
    "eps of 1.1": ("attn_norm", "q_norm", "k_norm", "ffn_norm", "final_norm"),
    "base of 1.00001": ("q_rope", "k_rope"),
    "scores of 1 + 1e-9": ("attn_scores",),
    "gate of 1 + 1e-9": ("ffn_act",),
    "cache of zeros": ("k_cache", "v_cache"),
    "residual of 1 + 1e-9": ("attn_residual",),
}
FLOAT64 = tuple(
    InjectedFault(
        name, "numpy-float64", "micro-qwen3", Check(red={"isolated": stages}, every=("chained", "logits"))
    )
    for name, stages in IN_FLOAT64.items()
)  # fmt: skip

IN_STORED_TYPES = {  # the mode and stage that show it, in a golden and live
    "eps of 1.1": ("isolated", "attn_norm"),
    "base of 1.00001": ("isolated", "q_rope"),
    "cache of zeros": ("isolated", "k_cache"),
    "cache of zeros in a step": ("decode", "k_cache"),
    "context lost after a cache": ("decode", "attn_context"),
    "activation of 1.001 in a step": ("decode", "ffn_act"),
    "a step one position on": ("decode", "q_rope"),
}
QUANTISED = ("Q8_0", "Q4_K_M")


def _stored(backend: str) -> Iterator[InjectedFault]:
    """Faults in models of two stored types; where a step shows one, a single pass over all tokens is right."""
    for model in QUANTISED:
        for name, (mode, stage) in IN_STORED_TYPES.items():
            only_in = None if mode == "isolated" else frozenset({"decode", "exact"})
            yield InjectedFault(name, backend, model, Check(some=(mode, stage), only_in=only_in))


def _every_product(name: str, model: str, *extra_stages: str) -> InjectedFault:
    check = Check(red={"isolated": PRODUCTS | {*extra_stages}}, by=VISIBLE)
    return InjectedFault(name, "numpy-ggml", model, check, rows="layer 0")


PACKED = (
    *_stored("numpy-ggml"),
    *(_every_product("activations not rounded", model) for model in ("BF16", "Q8_0", "Q4_K_M")),
    _every_product("sums not rounded", "Q5_1"),
    _every_product("matrices of the other layer", "IQ3_S", "attn_norm", "ffn_norm"),
    *(
        InjectedFault(
            "float16 cache", "numpy-ggml", model, Check(over={("chained", "attn_context"): VISIBLE}), rows="layer 0"
        )
        for model in ("F16", "Q4_1", "Q4_K_M")
    ),
)  # fmt: skip


def _torch(
    name: str, *shows: Any, model: str = "micro-qwen3", of_rounding: bool = False, **run: Any
) -> Iterator[InjectedFault]:
    """A fault of the torch path, in float32 and, unless it is one of rounding, in bfloat16."""
    far = Check(shows, factor=VISIBLE, engines=BOTH_ENGINES)
    yield InjectedFault(name, "torch", model, far, **run)
    if not of_rounding:
        yield InjectedFault(name, "torch", model, Check(shows), dtype="bfloat16", **run)


TORCH = (
    *(
        InjectedFault("none", "torch", "micro-qwen3", Check(), rows=rows, variant=variant)
        for rows in ("decode_rows", "sampler_rows", "stage_rows")
        for variant in ("", "-batch", "-sdpa")
    ),
    *_torch("rope pairs interleaved", "01b", "q_rope", 0),
    *_torch("rope of keys missing", "01b", "k_rope", 0),
    *_torch("position off by one in padded rows", "01b", "q_rope", 0, variant="-batch"),
    *_torch("mask of columns ignores padding", "04", "attn_scores", 0, variant="-batch"),
    *_torch("padding written over slot 0", "03", "k_cache", 0, variant="-batch", rows="decode_rows"),
    *_torch("first position ignored", "01b", "q_rope", 0, case="far"),
    *_torch("rope scaling ignored", "01b", "q_rope", 0, model="micro-llama3", case="far"),
    *_torch("rope tables in bfloat16", "01b", "q_rope", 0, of_rounding=True),
    *_torch("fused attention without scale", "05", "attn_context", 0, variant="-sdpa"),
    *_torch("causal mask aligned to the first slot", "03", "attn_context", 0, variant="-sdpa", rows="decode_rows"),
    *_torch("grouped heads tiled", "04", "attn_scores", 0),
    *_torch("scores not scaled", "04", "attn_scores", 0),
    *_torch("probabilities in bfloat16", "04", "attn_probs", 0, of_rounding=True),
    *_torch("eps outside the root", "01", "attn_norm", 0, of_rounding=True),
    *_torch("norm rounded before the gain", "01", "attn_norm", 0, of_rounding=True),
    *_torch("gain missing", "01", "attn_norm", 0),
    *_torch("products of 10 bits", "02", "q_proj", 0, of_rounding=True),
    *_torch("bias of queries missing", "02", "q_proj", 0, model="micro-qwen2"),
    *_torch("norms of queries and keys swapped", "02", "q_norm", 0),
    *_torch("last token not cached", "03", "k_cache", 0),
    *_torch("keys cached as values", "03", "v_cache", 0),
    *_torch("keys of the first row for all", "03", "k_cache", 0, variant="-batch"),
    *_torch("cache of an earlier answer kept", "03", "k_cache", 0, rows="decode_rows"),
    *_torch("one cache for all layers", "03", "k_cache", 0, rows="decode_rows"),
    *_torch("residual from the norm", "05", "attn_residual", 0),
    *_torch("gate and up swapped", "06", "ffn_gate", 0),
    *_torch("gelu for silu", "06", "ffn_act", 0),
    *_torch("tied head not tied", "08", "logits", model="micro-qwen2"),
    *_torch("context lost after a cache", "03", "attn_context", 0, rows="decode_rows"),
    *_torch("logits constant", "09", "selected_logits", rows="sampler_rows"),
    *_torch("token after the best one", "12", "generation", rows="sampler_rows"),
    *_torch("top-p drops the crossing token", "11", "probabilities.top_p", rows="sampler_rows"),
    *_torch("last column for the last token", "09", "selected_logits", variant="-batch", rows="sampler_rows"),
    *_torch("penalty missing", "11", "probabilities.penalty", rows="sampler_rows"),
    *_torch("min-p missing", "11", "probabilities.min_p", rows="sampler_rows"),
)

_LIVE = {
    "none": ALL_RIGHT,
    "context lost after a cache": Check(("03", "attn_context"), others=frozenset({PASS})),
    "cache of zeros": Check(("03", "k_cache"), others=frozenset({PASS})),
    "logits constant": Check(("03", "logits"), others=frozenset({PASS})),
    "token after the best one": Check(("12", "generation"), others=frozenset({PASS})),
    "top-p drops the crossing token": Check(("11", "probabilities.top_p"), others=frozenset({PASS})),
}


def _live() -> Iterator[InjectedFault]:
    """Faults in runs that both engines are asked about now."""
    for model in ("file", "folder"):
        for name, check in _LIVE.items():
            yield InjectedFault(name, "numpy-live", model, check)
            if name != "cache of zeros":
                yield InjectedFault(name, "torch-live", model, check)
        yield InjectedFault("none", "numpy-float64-live", model, Check())
        for name, stages in IN_FLOAT64.items():
            red = {stage for stage in stages if model == "folder" or stage not in ("q_norm", "k_norm")}
            yield InjectedFault(name, "numpy-float64-live", model, Check(red={"isolated": red}))
    yield from _stored("numpy-ggml-live")
    for model in QUANTISED:
        yield InjectedFault("none", "numpy-ggml-live", model, Check())
        generation = Check(red={ANY: {"generation"}})
        yield InjectedFault("logits of a step rolled", "numpy-ggml-live", model, generation)
        last = Check(red={ANY: {"selected_logits", "argmax"}})
        yield InjectedFault("last row constant", "numpy-ggml-live", model, last)


LIVE = tuple(_live())

LESS_IN_HALF = frozenset({  # red in bfloat16, by less than 10 times
    "merge-without-scale", "loss-smoothing-added", "accumulation-mean-of-means", "gradient-norm-second-term-missing",
    "gradient-silu-second-term-missing", "gradient-lora-input-left-out", "gradient-graph-cut-between-blocks",
    "gradient-residual-left-out", "gradient-divided-by-rows",
})  # fmt: skip
NOT_IN_HALF = frozenset({  # of files and of learning rates, which have no dtype
    "export-b-rows-not-permuted", "export-one-alpha", "schedule-one-step-late", "schedule-one-step-early",
    "schedule-decays-from-the-start", "schedule-without-warmup",
})  # fmt: skip
TRAINING_FAULTS = tuple(
    InjectedFault(
        mistake.name, "training", training_models_of(mistake)[-1],
        Check(
            (mistake.checkpoints[0],), over={(ANY, stage): VISIBLE for stage in mistake.stages},
            cases=frozenset(mistake.cases),
        ),
    )
    for mistake in TRAINING
    if training_models_of(mistake)
)  # fmt: skip
IN_TORCH_TRAINING = (
    "lora-scaled-twice", "lora-alpha-not-divided", "loss-labels-not-shifted", "loss-smoothing-missing",
    "gradient-keys-not-summed-over-group", "gradient-lora-input-left-out", "gradient-graph-cut-between-blocks",
    "clip-ignored", "clip-per-tensor", "adamw-no-bias-correction", "adamw-decay-missing", "adamw-decay-after-update",
)  # fmt: skip


def _torch_training(name: str, dtype: DtypeName) -> InjectedFault:
    mistake, variant = MISTAKES[name], TRAINER if name == "gradient-graph-cut-between-blocks" else ""
    least = 1 if dtype == "bfloat16" and name in LESS_IN_HALF else VISIBLE
    check = Check((mistake.checkpoints[0],), over={(ANY, mistake.stages[0]): least})
    return InjectedFault(name, "training-torch", SMALLEST, check, variant=variant, dtype=dtype)


TORCH_TRAINING = tuple(_torch_training(name, d) for name in IN_TORCH_TRAINING for d in ("float32", "bfloat16"))
SHARED = {  # code that both precisions share -> the group of stages that shows it alone
    "llorch.ops.lora.lora_delta": "lora_delta",
    "llorch.ops.lora.lora_backward": "gradient",
    "llorch.ops.cross_entropy.cross_entropy": "token_losses",
    "llorch.ops.cross_entropy.cross_entropy_backward": "gradient",
    "llorch.ops.rms_norm.rms_norm_backward": "gradient",
    "llorch.ops.rope.rope_backward": "gradient",
    "llorch.ops.swiglu.swiglu_backward": "gradient",
    "llorch.ops.attention.attention_scores_backward": "gradient",
    "llorch.training.adamw.clip_by_norm": "grad_norm",
    "llorch.training.adamw.moments": "first_moment",
    "llorch.training.adamw.moved": "parameters",
    "llorch.training.adamw.learning_rate": "learning_rate",
    "llorch.lora.merge.merged_matrix": "merged_weight",
}
SHARED_TORCH = {
    "llorch.pytorch.lora.modules.delta": "lora_delta",
    "llorch.pytorch.lora.modules.DeltaFunction.backward": "gradient",
    "llorch.pytorch.train.step.loss_sum": "gradient",
    "llorch.pytorch.train.step.trained_tokens": "gradient",
    "llorch.pytorch.train.adamw.AdamW.clip": "first_moment",
    "llorch.pytorch.train.adamw.AdamW.step": "parameters",
}


def _one_in_a_million(part: str, group: str, backend: str, variant: str = "") -> InjectedFault:
    return InjectedFault(part, backend, SMALLEST, Check(over={(ANY, group): LEAST}), variant=variant, dtype="float64")


TRAINING_FLOAT64 = (
    *(_one_in_a_million(part, group, "training-float64") for part, group in SHARED.items()),
    *(
        _one_in_a_million(part, group, "training-torch-float64", variant)
        for part, group in SHARED_TORCH.items()
        for variant in ("", TRAINER)
    ),
)
