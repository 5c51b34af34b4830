"""A server of the OpenAI interface for one model, and nothing else: see `llorch.serve.app`."""
