"""Known mistakes that are a right name for a bug; a bug that is not listed is no known mistake.

Several names are listed if several are right: a wrong constant with its own name and the setting that it belongs to,
or two mistakes that compute the same.
"""

_LINES = """
logits-divided-by-root-of-width: scaled
products-not-scaled: scores-not-scaled scores-scale
divided-by-the-width-of-a-head: scores-divided-by-head-dim scores-scale
divided-by-the-root-of-the-width: scores-scaled-by-hidden scores-scale
divided-by-the-root-of-hidden-over-heads: scores-scaled-by-hidden-over-heads scores-scale
scale-of-a-tenth: scores-scale
scale-of-base-two: scores-scale
scale-lost-in-one-block: scores-not-scaled scores-scale
scores-capped-at-50: soft-cap
everything-visible: mask-missing
next-one-visible: mask-shows-next
itself-hidden: mask-hides-itself mask-hides-itself-but-first
newest-key-hidden-in-steps: mask-hides-itself mask-hides-itself-but-first
past-hidden: mask-reversed
mask-laid-at-the-first-key: mask-ignores-cache
hidden-by-ten: mask-minus-ten
window-of-six: mask-window
window-of-twenty: mask-window
keys-tiled: groups-tiled-for-keys
values-tiled: groups-tiled-for-values
keys-and-values-tiled: groups-tiled-for-keys groups-tiled-for-values
scores-in-half: scores-in-half scaled-scores-in-half
shares-over-queries: softmax-over-queries
exponentials-not-divided: softmax-not-divided
shares-to-base-two: softmax-base-two scores-scale
hidden-after-the-shares: mask-after-softmax
heads-joined-as-they-lie: heads-joined-without-transpose
heads-joined-last: heads-joined-interleaved
keys-mixed: context-mixes-keys
queries-cut-with-heads-last: qkv-heads-interleaved heads-cut-last
values-cut-with-heads-last: qkv-heads-interleaved heads-cut-last
past-forgotten: cache-past-forgotten
past-forgotten-between-chunks: cache-past-forgotten
written-from-the-start: cache-past-overwritten
second-chunk-over-the-first: cache-past-overwritten
written-one-slot-early: cache-one-slot-early
newest-in-front: cache-newest-first
read-before-written: cache-never-written
values-written-late: cache-never-written
warm-up-left: cache-warm-up-left
keys-kept-as-projected: cache-keys-before-rope
heads-repeated-before-they-are-kept: cache-heads-repeated
keys-kept-as-values: cache-keys-and-values-exchanged
keys-kept-twice: cache-keys-and-values-exchanged
rows-kept-without-a-transpose: cache-heads-and-tokens-mixed cache-tokens-and-heads-mixed
eps-of-no-file: norm-eps
eps-of-llama-in-qwen: norm-eps-1e-5-for-1e-6 norm-eps
eps-of-qwen-in-llama: norm-eps-1e-6-for-1e-5 norm-eps
eps-forgotten: norm-eps-missing norm-eps
eps-behind-the-root: norm-eps-outside-root
mean-taken-away: norm-is-layer-norm
sample-variance: norm-divides-by-n-minus-one
length-one: norm-sum-for-mean
divided-by-the-square: norm-root-missing
squares-summed-in-half: norm-squares-in-half
one-square-for-all-rows: norm-over-all-tokens
gain-is-one-plus-weight: norm-gain-plus-one
gain-of-the-wrong-norm: norm-gain-of-other-norm
gain-never-applied-at-first: norm-gain-missing
gains-of-q-and-k-exchanged: norm-gain-of-other-norm
second-norm-left-out: norm-skipped ffn-input-not-normalised
last-norm-left-out: norm-skipped logits-final-norm-skipped
last-norm-twice: logits-final-norm-twice norm-twice
heads-not-normalised: norm-skipped
heads-normalised-together: norm-of-heads-together
heads-normalised-after-the-turn: rope-before-norm
neighbours-turned: rope-interleaved-pairs
turned-backwards: rope-sign-flipped
cosine-and-sine-exchanged: rope-cos-and-sin-exchanged rope-sign-flipped
base-of-old: rope-base-1e4 rope-theta
base-of-qwen: rope-base-1e6 rope-theta
base-of-nobody: rope-theta
base-of-old-under-a-scaling: rope-base-1e4 rope-theta
positions-from-one: rope-position-plus-one rope-position-offset
positions-from-seven: rope-position-offset
position-of-the-first-token-for-all: rope-position-frozen
head-for-position: rope-position-by-head
positions-restart: rope-position-restarts rope-position-offset
positions-restart-in-chunks: rope-position-restarts rope-position-offset
position-is-the-step: rope-position-counts-steps rope-position-offset
position-of-a-step-one-early: rope-position-offset
positions-skip-to-the-end-of-a-padded-chunk: rope-position-plus-one rope-position-offset
first-half-of-heads-turned: rope-first-half-only rope-rotated-share
quarter-of-heads-turned: rope-rotated-share
exponent-halved: rope-exponent-halved rope-theta
exponent-by-hidden-over-heads: rope-exponent-by-hidden-over-heads rope-theta
speeds-in-bfloat16: rope-frequencies-in-bfloat16
tables-in-half: rope-tables-in-half
not-stretched: rope-scaling-missing
all-stretched-alike: rope-scaling-linear
sped-up: rope-scaling-inverted
stretched-by-32: rope-scaling-factor rope-llama3-factor
positions-divided-by-four: rope-position-factor rope-scaling-linear
turned-twice: rope-position-factor
nothing-turned: rope-missing
keys-not-turned: rope-missing
queries-not-turned-in-one-block: rope-missing
values-turned: rope-on-values
silu-of-up: swiglu-silu-on-up
silu-of-both: swiglu-silu-on-both
silu-of-the-product: swiglu-silu-of-product
silu-of-silu: swiglu-silu-twice
sigmoid-alone: swiglu-sigmoid-only
negative-gates-cut-off: swiglu-relu
gelu-by-erf: swiglu-gelu
gelu-by-tanh: swiglu-gelu-tanh
gelu-in-one-block: swiglu-gelu-tanh
gelu-quick: swiglu-gelu-quick
up-left-out: swiglu-up-missing
feed-forward-of-the-stream: ffn-input-not-normalised
feed-forward-of-the-first-norm: ffn-input-of-attention
feed-forward-of-attention: ffn-input-is-attention-output
up-of-the-stream: ffn-input-not-normalised
attention-added-to-its-input: attention-residual-from-normed
attention-without-the-stream: attention-residual-skipped
stream-without-attention: attention-dropped
stream-without-attention-in-one-block: attention-dropped
feed-forward-added-to-its-input: block-residual-from-normed
feed-forward-without-the-stream: block-residual-skipped
feed-forward-added-to-the-block-input: block-residual-from-block-input
attention-added-twice: block-attention-added-twice
stream-without-feed-forward: block-feed-forward-dropped
queries-transposed: weight-dimensions-not-reversed
output-transposed: weight-dimensions-not-reversed
output-not-projected: o-proj-skipped
up-read-with-axes-exchanged: weight-dimensions-not-reversed
keys-read-with-axes-exchanged: weight-dimensions-not-reversed
values-never-loaded: weight-never-loaded
down-never-loaded: weight-never-loaded
biases-not-loaded: qkv-bias-missing
bias-for-queries-only: qkv-bias-missing
biases-added-twice: qkv-bias-twice
bias-of-values-twice-in-one-layer: qkv-bias-twice
keys-and-values-exchanged: qkv-keys-and-values-swapped
fused-matrix-cut-by-group: qkv-fused-per-group
query-rows-with-heads-last: qkv-heads-interleaved qkv-rows-with-heads-last
value-rows-with-heads-last: qkv-heads-interleaved qkv-rows-with-heads-last
rows-left-in-pairs: qk-rows-left-interleaved
rows-taken-out-of-pairs-needlessly: qk-rows-reordered-needlessly
keys-paired-by-query-heads: k-rows-reordered-by-query-heads
output-columns-with-heads-last: o-proj-heads-interleaved o-proj-columns-with-heads-last
gate-and-up-exchanged: ffn-gate-and-up-swapped
gate-and-up-alternate: ffn-fused-rows-alternate
block-with-the-weights-of-the-first: weights-of-other-layer
keys-with-the-matrix-of-the-first-block: weights-of-other-layer
down-of-the-block-before: weights-of-other-layer
stream-projected-without-the-norm: qkv-input-not-normalised
row-of-the-next-token: embedding-ids-off-by-one
embeddings-times-root-of-width: embedding-scaled
beginning-twice: embedding-first-token-twice
rows-of-the-output-matrix: embedding-from-lm-head
embeddings-read-with-axes-exchanged: embedding-dimensions-not-reversed
tied-without-being-so: logits-tied-wrongly
output-rows-one-late: logits-rows-shifted
capped-at-30: logits-soft-capped soft-cap
capped-at-50: soft-cap
log-probabilities-for-logits: logits-are-log-probabilities
logits-of-the-stream-before-the-norm: logits-final-norm-skipped
neighbours-turned-with-the-base-of-old: rope-interleaved-pairs rope-base-1e4 rope-theta
neighbours-turned-and-not-stretched: rope-interleaved-pairs rope-scaling-missing
turned-backwards-from-one: rope-sign-flipped rope-position-plus-one rope-position-offset
not-scaled-and-next-one-visible: scores-not-scaled scores-scale mask-shows-next
keys-tiled-and-divided-twice: groups-tiled-for-keys scores-divided-by-head-dim scores-scale
one-plus-weight-with-another-eps: norm-gain-plus-one norm-eps
halves-of-bytes-by-turns: block-nibbles-alternate
high-halves-of-bytes-first: block-nibbles-swapped
codes-without-a-zero-point: block-zero-point-forgotten
scale-of-the-block-before: block-scale-of-neighbour
minimum-of-blocks-left-out: block-minimum-dropped
scale-and-minimum-of-blocks-exchanged: block-scale-and-minimum-swapped
rows-out-of-pairs-and-no-bias: qk-rows-reordered-needlessly qkv-bias-missing
"""
NAMES: dict[str, tuple[str, ...]] = {
    bug: tuple(names.split()) for bug, names in (line.split(": ") for line in _LINES.strip().splitlines())
}
VALUES: dict[str, float] = {  # values to recover with the name
    "scale-of-a-tenth": 0.1, "scores-capped-at-50": 50, "window-of-six": 6, "window-of-twenty": 20,
    "eps-of-no-file": 3e-6, "eps-of-llama-in-qwen": 1e-5, "eps-of-qwen-in-llama": 1e-6, "base-of-old": 1e4,
    "base-of-qwen": 1e6, "base-of-nobody": 123456, "positions-from-one": 1, "positions-from-seven": 7,
    "stretched-by-32": 32, "quarter-of-heads-turned": 0.25, "turned-twice": 0.5,
    "positions-divided-by-four": 4, "capped-at-30": 30, "capped-at-50": 50,
}  # fmt: skip
ALIKE: dict[str, tuple[str, tuple[str, ...]]] = {  # alternatives if the stages between are not dumped
    "keys-mixed": ("v_cache", ("cache-keys-and-values-exchanged",)),
    "keys-kept-twice": ("attn_context", ("context-mixes-keys",)),
    "read-before-written": ("attn_out v_proj", ("weight-never-loaded", "attention-dropped")),
    "values-never-loaded": ("attn_out attn_residual", ("weight-never-loaded", "attention-dropped")),
    "stream-without-attention": ("attn_out v_proj", ("weight-never-loaded",)),
    "stream-without-attention-in-one-block": ("attn_out v_proj", ("weight-never-loaded",)),
    "stream-without-feed-forward": ("ffn_out ffn_gate ffn_up", ("weight-never-loaded",)),
    "heads-joined-last": ("attn_out", ("o-proj-heads-interleaved",)),
    "keys-not-turned": ("k_cache", ("cache-keys-before-rope",)),
    "down-never-loaded": ("block_out ffn_gate ffn_up", ("block-feed-forward-dropped",)),
}
