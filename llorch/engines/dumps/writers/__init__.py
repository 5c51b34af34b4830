"""Dump writers to copy into an engine; they do not need llorch: Python, C, Rust, and C++ for ggml."""
