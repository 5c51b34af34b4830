"""Checks of lessons, by kind: each replaces functions of llorch by the learner's and runs the verification."""
