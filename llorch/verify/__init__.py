"""Verification: what engines that others wrote show, what ours makes of the same, and the verdict."""
