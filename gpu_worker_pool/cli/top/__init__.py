"""`gpu-pool top`: the pool, live, in a terminal."""
