"""`gpu-pool serve`: the server with its settings from the command line."""
