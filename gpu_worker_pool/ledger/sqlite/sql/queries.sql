-- The queries of the SQLite journal. Each is loaded by the name above it.


-- name: append_event
-- Positions are in sequence. `crc` continues that of the row before, see 0001_initial.sql.
INSERT INTO event (position, at, kind, body, crc) VALUES (?, ?, ?, ?, ?);

-- name: read_events
SELECT body, crc FROM event ORDER BY position;

-- name: read_rows
-- For a migration that rewrites them.
SELECT position, body FROM event ORDER BY position;

-- name: rewrite_event
UPDATE event SET at = ?, kind = ?, body = ?, crc = ? WHERE position = ?;

-- name: last_crc
-- The crc that the next event continues.
SELECT crc FROM event ORDER BY position DESC LIMIT 1;

-- name: count_since_compaction
SELECT count(*) FROM event WHERE position > (SELECT compacted_to FROM compaction);

-- name: bytes_since_compaction
SELECT coalesce(sum(length(body)), 0) FROM event WHERE position > (SELECT compacted_to FROM compaction);

-- name: used_bytes
-- The pages in use; pages that a deletion freed are used again before the file grows.
SELECT (c.page_count - f.freelist_count) * s.page_size
FROM pragma_page_count() AS c, pragma_freelist_count() AS f, pragma_page_size() AS s;

-- name: span_of_ended
-- By position, see prune_ended.
SELECT coalesce(max(position) - min(position) + 1, 0) FROM ended_lease;

-- name: delete_events
DELETE FROM event;

-- name: note_compaction
-- The last position so far. Positions are never reused, so all later events come after this one.
UPDATE compaction SET compacted_to = ?;

-- name: keep_ended
-- A lease that is already there is replaced, and counts as the latest again.
INSERT OR REPLACE INTO ended_lease (
    lease_id, owner, worker_id, host, gpu_count, memory_mb, fence,
    requested_at, granted_at, ended_at, reason, gpus, body, crc
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: read_last_ended
-- In the order of writing, not of ended_at: wall clocks are sometimes set back.
SELECT body, crc FROM (
    SELECT position, body, crc FROM ended_lease ORDER BY position DESC LIMIT ?
) ORDER BY position;

-- name: note_pruned
-- Runs before pruning. It notes the latest end, not that of the last row: wall clocks are sometimes set back.
UPDATE accounting SET complete_since = (
    SELECT max(at) FROM (
        SELECT complete_since AS at FROM accounting
        UNION ALL
        SELECT ended_at FROM ended_lease WHERE position <= (SELECT max(position) FROM ended_lease) - ?
    )
);

-- name: prune_ended
-- By position, because counting would scan all rows. A replaced lease leaves a gap, so a few fewer than asked for may
-- stay.
DELETE FROM ended_lease WHERE position <= (SELECT max(position) FROM ended_lease) - ?;

-- name: last_position
-- The last position ever written, compacted events included; positions are never reused.
SELECT max((SELECT compacted_to FROM compaction), (SELECT coalesce(max(position), 0) FROM event));

-- name: note_lost
-- Leases that ended before this time are no longer known.
UPDATE accounting SET complete_since = ?;

-- name: complete_since
SELECT complete_since FROM accounting;

-- name: read_ended_within
-- Arguments: since and until. Leases that ended after `since` and were requested or granted before `until`,
-- by the index on ended_at. If a clock was set, any of the three times may be the first. Unknown end times are included.
-- Leases inside another lease are left out here and below: they are part of that one. A text in JSON cannot contain
-- the key with its quotes, so its presence in the body tells.
SELECT lease_id, owner, gpu_count, memory_mb IS NOT NULL, requested_at, granted_at, ended_at, reason, gpus
FROM ended_lease
WHERE (ended_at >= ?1 AND (ended_at < ?2 OR requested_at < ?2 OR granted_at < ?2) OR ended_at IS NULL)
    AND instr(body, '"parent":') = 0;

-- name: read_held_within
-- Arguments: since and now. Leases that held GPUs and ended in between, last one first, by the index on ended_at.
SELECT lease_id, body FROM ended_lease
WHERE ended_at BETWEEN ? AND ? AND gpu_count > 0 AND granted_at BETWEEN 0 AND ended_at
    AND instr(body, '"parent":') = 0
ORDER BY ended_at DESC;

-- name: read_unknown_within
-- Arguments: since and now. Leases that held GPUs, ended since then or at an unknown time, and are not among those above.
SELECT lease_id FROM ended_lease
WHERE (ended_at >= ? OR ended_at IS NULL) AND gpu_count > 0
    AND NOT coalesce(ended_at <= ? AND granted_at BETWEEN 0 AND ended_at, 0)
    AND instr(body, '"parent":') = 0;

-- name: read_pool_id
SELECT pool_id FROM identity;

-- name: keep_pool_id
-- For the file that replaces a damaged one: its leases are the same.
UPDATE identity SET pool_id = ?;

-- name: renew_pool_id
-- For a journal that is put back from a copy: holders of leases that it does not know must not believe what it says.
UPDATE identity SET pool_id = lower(hex(randomblob(8)));

-- name: count_ended
SELECT count(*) FROM ended_lease;

-- name: read_whole_events
SELECT position, at, kind, body, crc FROM event ORDER BY position;

-- name: read_whole_ended
SELECT lease_id, owner, worker_id, host, gpu_count, memory_mb, fence,
    requested_at, granted_at, ended_at, reason, gpus, body, crc
FROM ended_lease;

-- name: compacted_to
SELECT compacted_to FROM compaction;
