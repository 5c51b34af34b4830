"""Pure NumPy operations, one per file, each with its hand-derived backward: arrays in, arrays out.

An op takes activations and weights and returns the value of the formula at the top of its file, in the dtype of the
input. It stores, changes and checks nothing (shapes are annotations, which the tests check at every call). A backward
op takes the gradient by the output first, then the forward op's arguments. In the order of the forward pass:

    embedding  rms_norm  linear  rope  attention  swiglu          then `cross_entropy`, the loss
    sigmoid  short_conv  delta_rule         for gated attention and delta nets
    lora  dora          trained adapters of a frozen matrix
    precision           when sums are taken in float64: whenever that costs next to nothing
    rounding            activations rounded as by ggml's matrix products; only under `--numerics ggml`
    scheme_rounding     activations rounded by the scheme of a quantised folder; only under `--numerics scheme`
"""
