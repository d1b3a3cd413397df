"""PyTorch's own words for context parallelism. Users import them from `longspan.integrations.torch_api`."""
