"""Errors, child processes, memory and threads: code that knows nothing of models."""
