"""Errors, child processes, memory, threads, and the names of built-in models: support code without model arithmetic."""
