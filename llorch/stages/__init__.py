"""The tables of stages: `table` lists them, `stage_ref` names one array of a run, `comparison` measures differences."""
