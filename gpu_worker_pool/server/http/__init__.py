"""HTTP: who calls, what was sent, how it is answered."""
