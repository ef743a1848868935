"""The authority over this box's GPUs, and what it learns of them and of their holders."""
