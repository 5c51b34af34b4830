"""Diagnosis: find the first wrong stage of an engine, and the mistake that causes it.

Input: a `StageDump` and the weights that the engine ran. Output: a `Diagnosis`. Modules in reading order:

    attempt      a hypothesis about the cause, and the share of an error that it explains
    verdict      the result: local and inherited error of every stage, and findings
    guards       reads a dump only if its ids, positions, layout, norms, run and weights (`weight_hashes`) fit the model
    replay       llorch's forward pass on the engine's arrays, with mistakes injected at chosen stages
    dump_checker compares every stage with llorch's and locates an error by token, head and channel; `expected` derives
                 the tolerance of a right engine
    mistakes/    known mistakes; `variants` injects them
    search/      `hypotheses` lists possible causes: known mistakes, settings with a value, roundings; `cause_search`
                 injects them and measures the remaining error
    diagnose     makes the findings, and lists the mistakes that the dump cannot show
    training/    modules for optimizer steps: `diagnose`, `judge` (compares), `replay`, `hypotheses`, `score`, `start`
                 (an adapter of another step) and `advice` (what the dump lacks)
    report/      a diagnosis as JSON, JUnit and one HTML page; `cli` prints the table
"""
