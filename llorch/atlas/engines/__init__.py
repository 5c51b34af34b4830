"""Adapters: scripts that run an engine in its environment and write its dump; none of them imports llorch."""
