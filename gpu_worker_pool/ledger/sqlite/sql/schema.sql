-- One row. `pool_id` is the identity of the pool, made once: a holder believes the end of its lease only from the pool that
-- granted it. `compacted_to` is the position of the last event that the last compaction wrote. `complete_since`: the ended
-- leases are complete for all that ended after this (seconds since 1970); what ended before was pruned, or lost with a
-- damaged file. NULL: none was ever taken away.
CREATE TABLE pool (
    pool_id TEXT NOT NULL,
    compacted_to INTEGER NOT NULL,
    complete_since REAL
);
INSERT INTO pool (pool_id, compacted_to) VALUES (lower(hex(randomblob(8))), 0);

-- What happened, in order. `body` is the whole event as JSON. `crc` is the CRC-32 of the bodies of all events up to this one
-- (it goes on from the row before), so that an event that was altered, lost or moved is noticed. The journal numbers its
-- events itself. The other columns are for people.
CREATE TABLE event (
    position INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    crc INTEGER NOT NULL,
    at REAL AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.at') END),
    kind TEXT AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.kind') END)
);

-- Leases that ended, for the accounting and for those who ask again. `body` is the whole lease as JSON, and `crc` is its
-- CRC-32; the other columns are parts of it. Times are seconds since 1970; a lease that never left the queue has no fence,
-- granted_at and GPUs. A client may use the id of a forgotten lease again, so the time of the request is part of the key.
-- `reason`: a lease that its holder ended because it was warned counts as ended by the pool.
-- A number that is infinite is not JSON: then the columns are NULL.
CREATE TABLE ended_lease (
    position INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    crc INTEGER NOT NULL,
    lease_id TEXT AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.id') END) STORED,
    owner TEXT AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.request.holder.owner') END) STORED,
    gpu_count INTEGER AS (CASE WHEN json_valid(body) THEN json_array_length(body, '$.gpus') END) STORED,
    memory_mb REAL AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.request.wishes.memory_mb') END) STORED,
    requested_at REAL AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.requested_at') END) STORED,
    granted_at REAL AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.granted_at') END) STORED,
    ended_at REAL AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.ended_at') END) STORED,
    reason TEXT AS (
        CASE WHEN json_valid(body) THEN coalesce(json_extract(body, '$.warned'), json_extract(body, '$.reason')) END
    ) STORED,
    mean_utilization_percent REAL AS (
        CASE WHEN json_valid(body) THEN json_extract(body, '$.mean_utilization_percent') END
    ) STORED,
    worker_id TEXT AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.request.holder.worker_id') END),
    host TEXT AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.request.holder.host') END),
    fence INTEGER AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.fence') END),
    gpus TEXT AS (CASE WHEN json_valid(body) THEN json_extract(body, '$.gpus') END),
    UNIQUE (lease_id, requested_at)
);
CREATE INDEX ended_lease_by_ended_at ON ended_lease (ended_at);
