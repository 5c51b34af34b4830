"""Verification: what engines that others wrote show, what ours makes of the same, and the verdict.

In comes a model: a built-in name with its stored goldens, or a file that `engines` run now. Out come rows, one per
`comparison` of the array at one of the `places`. On the way, and in the order to read:

    judge      a claim of an array, made from goldens alone; the one function that makes a row of it
    limits     how far a right run may be from a golden: every limit of the forward pass, derived
    goldens    what producers showed; `truth` is what transformers computes in pure float64
    expectations/  the claims: of the forward pass, its tokens, files, quantised blocks; `training/` those of training
    runners/   what computes ours: NumPy as it runs and under ggml numerics, torch in each way it runs
    models     a model judged from end to end
    diff       two dumps compared with each other
"""
