"""Who is served next, with which GPUs, and why not yet."""
