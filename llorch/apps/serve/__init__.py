"""A server of the OpenAI interface for one model, and nothing else: see `llorch.apps.serve.app`."""
