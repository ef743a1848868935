"""How long a lease lives without a heartbeat."""

DEFAULT_TTL_S = 60.0
MAX_TTL_S = 7 * 24 * 3600.0
