"""Leadership in a fleet: one leader decides for many boxes, and its journal is in a database that all candidates share."""
