"""Write the small quantised folders of `reference_outputs/quantised_folders`, and the goldens of their weights.

Read `base` (the float weights), `by_script` (formats that a script here writes), `by_libraries` (formats that their own
library writes), then `dequantise` (the values that an independent library reads).
"""
