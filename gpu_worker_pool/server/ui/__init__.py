"""The page, its files and its data."""
