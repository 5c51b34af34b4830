"""Models on torch: loading, generating, serving and training, on the CPU and on CUDA.

Input: weights as `llorch.files` reads them, and token ids. Output: logits, tokens, trained adapters. The order to read:

    causal_lm, cache    the forward pass as torch modules, and its cache; `models/` has blocks that are not dense
    load                weights into modules; `stored_kinds` says which matrices stay packed; `memory` refuses what does
                        not fit
    decoding, sampling  one token after another; `batch` for many prompts at once
    model               the model that users hold
    kernels/            faster modules in C and Triton; a table per device, and the checks that a kernel must pass
    batch_invariant/    logits that do not depend on the other rows of a batch
    distributed/        one model on several processes: `launch`, `failure`, `sharding_plan`, `parallel`, `dtensor`
    serving/            jobs that come and go; lora/ and train/ are fine-tuning
"""
