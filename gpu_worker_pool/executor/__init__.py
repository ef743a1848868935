"""`GPUExecutor`: concurrent.futures on leased GPUs. Nothing is imported here, because each worker imports this package."""
