"""The names of the ways to order endpoints. They are in a file of their own, because every client checks a name, and few
order endpoints when they are made.
"""

STRATEGIES = ("availability", "round_robin", "weighted")
