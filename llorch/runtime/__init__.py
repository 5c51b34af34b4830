"""Errors, child processes, memory, threads, and the names of built-in models: code that computes nothing of a model."""
