"""Hooks on an unmodified torch model that show every stage."""
