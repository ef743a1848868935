"""The server of one GPU box: statistics over HTTP."""
