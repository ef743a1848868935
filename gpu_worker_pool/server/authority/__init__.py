"""The authority over this box's GPUs: driver, sampler, death watch, waiting connections."""
