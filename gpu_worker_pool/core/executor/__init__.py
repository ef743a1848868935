"""The decisions of an executor: its tasks, its workers and their leases."""
