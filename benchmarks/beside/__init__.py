"""This tree beside an earlier commit of it, in one run."""
