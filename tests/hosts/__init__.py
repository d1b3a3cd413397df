"""Other people's frameworks: Hugging Face, TRL, torchtitan, PyTorch's own context parallelism."""
