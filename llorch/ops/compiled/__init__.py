"""Products and decoders in C, shared by NumPy and torch; `library` builds them, without it llorch decodes in NumPy."""
