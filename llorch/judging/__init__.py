"""Verification: the values of reference engines, llorch's values for the same inputs, and the verdict.

Input: a built-in model with its stored goldens, or a file that `engines` run now. Output: rows, one per `comparison` of
the array at one of the `stage_refs`. The order to read:

    judge              an expected array with its tolerance, and the one function that makes a row of it
    tolerances/        every tolerance of the forward pass, derived from goldens and the float64 reference
    goldens            the stored values of the engines; `golden_store` reads and writes their files
    float64_reference  transformers in pure float64
    expectations/      the expected values: forward pass, tokens, files, quantised blocks; `training/` those of training
    runners/           llorch under test: NumPy as it runs and with ggml numerics, torch in each way it runs
    expert_selection   the experts that an engine chose
    models             a model judged from end to end
    diff               two dumps compared with each other
"""
