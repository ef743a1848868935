-- What happened, in order. `body` is the whole event as JSON; `at` and `kind` repeat parts of it for people who look.
-- `crc` is the CRC-32 of the bodies of all events up to this one (it goes on from the row before), so that an event
-- that was altered, lost or moved is noticed.
CREATE TABLE event (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    crc INTEGER NOT NULL
);

-- One row: the position of the last event that the last compaction wrote.
CREATE TABLE compaction (
    compacted_to INTEGER NOT NULL
);
INSERT INTO compaction (compacted_to) VALUES (0);

-- Leases that ended, for the accounting and for those who ask again. `body` is the whole lease as JSON, and `crc` is its
-- CRC-32; the other columns repeat parts of it for queries. Times are seconds since 1970; a lease that never left the
-- queue has no fence, granted_at and GPUs.
CREATE TABLE ended_lease (
    position INTEGER PRIMARY KEY,
    lease_id TEXT NOT NULL UNIQUE,
    owner TEXT,
    worker_id TEXT,
    host TEXT,
    gpu_count INTEGER NOT NULL,
    memory_mb REAL,
    fence INTEGER,
    requested_at REAL,
    granted_at REAL,
    ended_at REAL,
    reason TEXT NOT NULL,
    gpus TEXT NOT NULL,
    body TEXT NOT NULL,
    crc INTEGER NOT NULL
);
CREATE INDEX ended_lease_by_ended_at ON ended_lease (ended_at);
