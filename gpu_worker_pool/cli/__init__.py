"""The command line: `gpu-pool`."""
