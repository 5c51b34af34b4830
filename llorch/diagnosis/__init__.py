"""Diagnosis: the first wrong stage of anybody's engine, and the mistake that makes it.

In comes a `StageDump` and the weights that the engine ran; out comes a `Diagnosis`. In the order to read:

    attempt      a hypothesis, and what an attempt with it explains of an error
    verdict      the result: every stage's error, local and inherited, and findings
    guards       reads a dump if its numbers can be compared at all: ids, positions, layout, the run; `weight_hashes`
    replay       llorch's forward pass on the engine's arrays, with mistakes injected at given stages
    dump_checker every stage compared with llorch's, and the tokens, heads and channels of an error; `expected` gives
                 the tolerance of a right engine
    mistakes/    known mistakes; `variants` injects them
    search/      `hypotheses` lists possible causes: known mistakes, settings with a value, roundings; `cause_search`
                 injects them and measures the remaining error
    diagnose     the hypotheses that explain the error, the remaining error, and mistakes that the dump cannot show
    training/    the modules for optimizer steps: `diagnose`, `judge`, `replay`, `hypotheses` and `score`
    report/      a diagnosis as JSON, JUnit and one HTML page; `cli` prints the table
"""
