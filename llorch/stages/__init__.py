"""Stage tables: `table` lists the stages, `stage_ref` names one array of a run, `comparison` measures differences."""
