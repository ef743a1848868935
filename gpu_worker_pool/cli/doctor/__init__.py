"""`gpu-pool doctor`: what is wrong on this machine, and what to do about it."""
