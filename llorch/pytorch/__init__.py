"""The torch path: loading, running, generating and verifying on CPU and CUDA."""
