"""The journal of a fleet in PostgreSQL. It needs asyncpg, which the extra `fleet` brings; nothing else does."""
