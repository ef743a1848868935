-- What the SQLite journal asks its file. Each query is known by the name above it.


-- name: append_event
-- The position is the next one by itself. `crc` goes on from the row before, see 0001_initial.sql.
INSERT INTO event (at, kind, body, crc) VALUES (?, ?, ?, ?);

-- name: read_events
SELECT body, crc FROM event ORDER BY position;

-- name: last_crc
-- From where the next event's crc goes on.
SELECT crc FROM event ORDER BY position DESC LIMIT 1;

-- name: count_since_compaction
SELECT count(*) FROM event WHERE position > (SELECT compacted_to FROM compaction);

-- name: delete_events
DELETE FROM event;

-- name: note_compaction
-- Positions are never used twice, so that what is appended from here on stands behind this one.
UPDATE compaction SET compacted_to = (SELECT coalesce(max(position), 0) FROM event);

-- name: keep_ended
-- One that is there already is replaced, and counts as the latest again.
INSERT OR REPLACE INTO ended_lease (
    lease_id, owner, worker_id, host, gpu_count, memory_mb, fence,
    requested_at, granted_at, ended_at, reason, gpus, body, crc
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: read_last_ended
-- In the order of writing, not of ended_at: clocks on the wall are set back now and then.
SELECT body, crc FROM (
    SELECT position, body, crc FROM ended_lease ORDER BY position DESC LIMIT ?
) ORDER BY position;

-- name: note_pruned
-- Before they are pruned. The latest of them and not the last one: clocks on the wall are set back now and then.
UPDATE accounting SET complete_since = (
    SELECT max(at) FROM (
        SELECT complete_since AS at FROM accounting
        UNION ALL
        SELECT ended_at FROM ended_lease WHERE position <= (SELECT max(position) FROM ended_lease) - ?
    )
);

-- name: prune_ended
-- By position and not by counting, which would walk through all of them; a replaced one leaves a gap, so a few less
-- than asked for may stay.
DELETE FROM ended_lease WHERE position <= (SELECT max(position) FROM ended_lease) - ?;

-- name: last_position
-- How far the journal goes, compacted events included; positions are never used twice.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event'), 0);

-- name: note_lost
-- Those who ended before this are not known any more.
UPDATE accounting SET complete_since = ?;

-- name: complete_since
SELECT complete_since FROM accounting;

-- name: read_ended_within
-- Since, and three times until: what ended since then and had begun to wait or to run before the other, by the index on
-- ended_at. Where a clock was set, any of the three times may be the first. Who ended at an unknown time is always there.
SELECT lease_id, owner, gpu_count, memory_mb IS NOT NULL, requested_at, granted_at, ended_at FROM ended_lease
WHERE ended_at >= ? AND (ended_at < ? OR requested_at < ? OR granted_at < ?) OR ended_at IS NULL;

-- name: read_held_within
-- Since and now: who held GPUs and ended in between, the last one first, by the index on ended_at.
SELECT lease_id, body FROM ended_lease
WHERE ended_at BETWEEN ? AND ? AND gpu_count > 0 AND granted_at BETWEEN 0 AND ended_at
ORDER BY ended_at DESC;

-- name: read_unknown_within
-- Since and now: who held GPUs and is not among those above, though he ended since then or at an unknown time.
SELECT lease_id FROM ended_lease
WHERE (ended_at >= ? OR ended_at IS NULL) AND gpu_count > 0
    AND NOT coalesce(ended_at <= ? AND granted_at BETWEEN 0 AND ended_at, 0);
