"""Diagnosis: the first wrong stage of anybody's engine, and the mistake that makes it.

In comes a `StageDump` and the weights that the engine ran; out comes a `Diagnosis`. In the order to read:

    verdict      what comes out: every stage's error, local and inherited, and findings
    profile      in which tokens, heads and channels an error lies
    guards       whether numbers may be compared at all: ids, positions, layout, the run; `norm_places`, `weight_hashes`
    replay       our forward pass, fed what the engine showed; with mistakes planted where it is told
    judged       every stage beside ours; `expected` is how far a right engine may be off
    hypotheses   what may be planted: known mistakes, settings with a value, honest differences of arithmetic
    diagnose     which of them explain the error, what is left, and what this dump could not have shown;
                 `trials` plants them
    rows         what it judged, as rows of `llorch verify`
    training     the same of optimizer steps: `training_judge` and `training_replay` are its judge and its replay,
                 `training_hypotheses`, `training_score` and `training_gaps` what may be planted, and how it fits

How it is shown: `verify.report` has JSON, JUnit and one HTML page, `cli` the table.
"""
