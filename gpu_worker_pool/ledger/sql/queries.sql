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

-- name: prune_ended
-- By position and not by counting, which would walk through all of them; a replaced one leaves a gap, so a few less
-- than asked for may stay.
DELETE FROM ended_lease WHERE position <= (SELECT max(position) FROM ended_lease) - ?;

-- name: last_position
-- How far the journal goes, compacted events included; positions are never used twice.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'event'), 0);
