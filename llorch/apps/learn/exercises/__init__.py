"""The exercises, lesson by lesson: the functions that learners write, and the llorch functions that they replace."""
