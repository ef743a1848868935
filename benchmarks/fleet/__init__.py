"""Several boxes that share their GPUs: what a lease costs there, and what happens when the leader dies."""
