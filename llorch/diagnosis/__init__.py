"""Diagnosis: the first wrong stage of anybody's engine, and the mistake that makes it.

In comes a `StageDump` and the weights that the engine ran; out comes a `Diagnosis`. In the order to read:

    verdict      the result: every stage's error, local and inherited, and findings
    profile      the tokens, heads and channels that have an error
    guards       reads a dump if its numbers can be compared at all: ids, positions, layout, the run; `weight_hashes`
    replay       llorch's forward pass on the engine's arrays, with mistakes injected at given stages
    dump_checker every stage compared with llorch's; `expected` gives the tolerance of a right engine
    mistakes/    known mistakes; `variants` injects them
    search/      `hypotheses` lists possible causes: known mistakes, settings with a value, honest differences of
                 arithmetic; `trials` injects them and measures the remaining error
    diagnose     the hypotheses that explain the error, the remaining error, and mistakes that the dump cannot show
    rows         the results as rows of `llorch verify`
    training/    the modules for optimizer steps: `diagnose`, `judge`, `replay`, `hypotheses`, `score` and `gaps`
    report/      a diagnosis as JSON, JUnit and one HTML page; `cli` prints the table
"""
