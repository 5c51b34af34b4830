"""Verification: the values of reference engines, llorch's values for the same inputs, and the verdict.

Input: a built-in model with its stored goldens (arrays of engines), or a file that `engines` run now. Output: one
`Comparison` for each array. Read the modules in this order:

    types              expected array, comparison, cause of an error
    compare            the only function that compares an array with the expected array
    tolerances/        every tolerance of the forward pass, derived from goldens and the float64 reference
    goldens/           stored outputs of the engines; `store` reads and writes their files, `float64_reference` runs
                       transformers in pure float64
    expectations/      the expected values: forward pass, tokens, files, quantised blocks, training
    runners/           llorch under test: NumPy, NumPy with ggml numerics, and every execution mode of torch
    runner_check       comparison of one runner with the expectations of the forward pass
    expert_selection   comparison of selected experts
    verify             verification of a model from end to end
    dump_diff          comparison of two dumps
"""
