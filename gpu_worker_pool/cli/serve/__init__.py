"""`gpu-pool serve`: the server, with settings from the command line."""
