"""Pure NumPy operations, one per file, each beside its hand-derived backward: arrays in, arrays out.

In come activations and weights, out comes what the formula on top of the page says, in the dtype of the input; nothing
is kept, changed or checked (shapes are annotations, which the tests check at every call). A backward op takes the
gradient by the result, then what the forward op took. In the order of the forward pass:

    embedding  rms_norm  linear  rope  attention  swiglu          then `cross_entropy`, where training begins
    sigmoid  short_conv  delta_rule         what gated attention and delta nets add
    lora  dora          what is trained beside a frozen matrix
    precision           when sums are taken in float64: whenever that costs next to nothing
    rounding            activations as ggml's matrix products see them; only under `--numerics ggml`
    scheme_rounding     activations as the scheme of a quantised folder rounds them; only under `--numerics scheme`
"""
