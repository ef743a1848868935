"""What guards against regressions, and how the pool compares with others: `make bench` runs it all."""
