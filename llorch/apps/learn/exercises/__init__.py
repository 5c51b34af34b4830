"""The functions that learners write, lesson by lesson, and where each stands in the running code."""
