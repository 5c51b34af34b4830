"""Models on torch: loading, generating, serving and training, on the CPU and on CUDA.

Input: weights as `llorch.files` reads them, and token ids. Output: logits, tokens, trained adapters. Reading order:

    causal_lm, cache    the forward pass as torch modules, and its cache; `models/` has blocks that are not dense
    load                weights into modules; `stored_kinds` selects matrices that stay packed (quantised, as in their
                        file); `memory` refuses models that do not fit
    decoding, sampling  decode steps and sampling; `batch` for many prompts at once
    model               the model class for users
    kernels/            faster modules in C and Triton; a table per device, and the checks that a kernel must pass
    batch_invariant/    logits that do not depend on the other rows of a batch
    distributed/        one model on several processes: `launch`, `failure`, `sharding_plan`, `parallel`, `dtensor`
    capture/            hooks that show the stages of any torch model
    serving/            continuous batching; lora/ and train/ are fine-tuning
"""
