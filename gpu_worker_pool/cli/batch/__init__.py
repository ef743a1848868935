"""`gpu-pool batch`: many commands, each with its own lease."""
