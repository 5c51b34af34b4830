"""All that runs on torch: the model, loading, generating, training with adapters, on the CPU and on CUDA.

In: weights as `llorch.files` reads them, token ids. Out: logits, tokens, trained adapters. Read `causal_lm` first, the
forward pass on one page, with `cache`; then `load`, `packing` and `quantised_linear` (weights), `decoding`, `sampling`
and `batch` (a token after the other), `model`, which is what users hold. What is faster than the page stands beside it:
`leaves` puts it in, `cpu/` and `cuda/` have it, `trial` and `proof` say whether it may run. `reproducible` trades speed
for bits that nothing but the prompt decides, `memory` refuses what does not fit. `lora/` and `train/` are fine-tuning.

Several processes: `ranks` starts them and `ending` ends them, `splitting` says what each has, `parallel` and
`parallel_experts` split a model, `parallel_model` generates with it, `parts` is a tensor of which a process has a part.
"""
