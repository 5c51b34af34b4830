"""Products on top of the library: lessons, the server, quality, benchmarks, the doctors. None imports another."""
