"""Writers to be copied into an engine, none of which needs llorch: Python, C, Rust, and C++ for ggml."""
