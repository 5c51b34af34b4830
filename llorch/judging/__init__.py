"""Verification: the values of reference engines, llorch's values for the same inputs, and the verdict.

Input: a built-in model with its stored goldens, or a file that `engines` run now. Output: rows, one per `comparison` of
the array at one of the `stage_refs`. The order to read:

    types              what is expected of an array, the result of its comparison, the cause of an error
    compare            the one function that compares an array with the expected one
    tolerances/        every tolerance of the forward pass, derived from goldens and the float64 reference
    goldens/           the stored values of the engines; `store` reads and writes their files, `float64_reference` is
                       transformers in pure float64
    expectations/      the expected values: forward pass, tokens, files, quantised blocks, training
    runners/           llorch under test: NumPy as it runs and with ggml numerics, torch in each way it runs
    runner_check       one runner and the expectations of the forward pass
    expert_selection   the experts that an engine chose
    verify             a model judged from end to end
    dump_diff          two dumps compared with each other
"""
