"""`gpu-pool demo`: workers compete for simulated GPUs, and what happened is checked."""
