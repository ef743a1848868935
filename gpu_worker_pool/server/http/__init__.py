"""HTTP: access, bodies, routing and answers."""
