"""Diagnosis: the first wrong stage of anybody's engine, and the mistake that makes it.

In comes a `StageDump` and the weights that the engine ran; out comes a `Diagnosis`. In the order to read:

    verdict      what comes out: every stage's error, local and inherited, and findings
    profile      in which tokens, heads and channels an error lies
    guards       whether numbers may be compared at all: ids, positions, layout, the run; `weight_hashes`
    replay       our forward pass, fed what the engine showed; with mistakes planted where it is told
    judged       every stage beside ours; `expected` is how far a right engine may be off
    mistakes/    known mistakes; `variants` plants them
    search/      `hypotheses` lists what may be planted: known mistakes, settings with a value, honest differences of
                 arithmetic; `trials` plants them and measures what is left
    diagnose     the hypotheses that explain the error, what is left, and what this dump could not have shown
    rows         what it judged, as rows of `llorch verify`
    training/    the same of optimizer steps: `diagnose`, `judge`, `replay`, `hypotheses`, `score` and `gaps`
    report/      a diagnosis as JSON, JUnit and one HTML page; `cli` prints the table
"""
