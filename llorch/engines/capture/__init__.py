"""Hooks on an unmodified torch model that record every stage."""
