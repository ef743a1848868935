"""The leader's side of a fleet: the connections of the agents."""
