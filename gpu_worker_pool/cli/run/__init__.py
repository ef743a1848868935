"""`gpu-pool run`: one command under guard, with a lease."""
