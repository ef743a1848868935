"""What hands out the GPUs of an endpoint: its server, or this process."""
