-- One row: the identity of this pool, made once and never changed. A holder believes the end of its lease only from the
-- pool that granted it.
CREATE TABLE identity (
    pool_id TEXT NOT NULL
);
INSERT INTO identity (pool_id) VALUES (lower(hex(randomblob(8))));
