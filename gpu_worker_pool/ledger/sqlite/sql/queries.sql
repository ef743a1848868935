-- The queries of the SQLite journal. Each is loaded by the name above it.


-- name: append_event
INSERT INTO event (position, body, crc) VALUES (?, ?, ?);

-- name: read_events
SELECT body, crc FROM event ORDER BY position;

-- name: last_epoch
-- That of the last driver: above 0 if it led a fleet, whose events name several nodes.
SELECT json_extract(body, '$.epoch') FROM event WHERE kind = 'TakenOver' ORDER BY position DESC LIMIT 1;

-- name: last_position
-- The last position ever written, compacted events included; positions are never reused.
SELECT max((SELECT compacted_to FROM pool), (SELECT coalesce(max(position), 0) FROM event));

-- name: delete_events
DELETE FROM event;

-- name: note_compaction
UPDATE pool SET compacted_to = ?;

-- name: read_pool
-- Its identity, what was written since the last compaction, and the crc that the next event continues.
SELECT pool_id, compacted_to, (SELECT coalesce(sum(length(body)), 0) FROM event WHERE position > compacted_to),
    coalesce((SELECT crc FROM event ORDER BY position DESC LIMIT 1), 0)
FROM pool;

-- name: begin_again
-- For a file that replaces another one. If the pool is the same its identity is given. If not, as after a restore, it stays
-- that of a new pool: holders of leases that the file does not know must not believe what it says.
UPDATE pool SET pool_id = coalesce(?, pool_id), compacted_to = ?, complete_since = ?;

-- name: keep_ended
-- A lease that is already there is replaced, and counts as the latest again.
INSERT OR REPLACE INTO ended_lease (body, crc) VALUES (?, ?);

-- name: read_last_ended
-- In the order of writing, not of ended_at: wall clocks are sometimes set back.
SELECT body, crc FROM (SELECT position, body, crc FROM ended_lease ORDER BY position DESC LIMIT ?) ORDER BY position;

-- name: read_all_ended
SELECT body, crc FROM ended_lease ORDER BY position;

-- name: size_of_ended
-- The bytes that are used (pages that a deletion freed are used again before the file grows), the first and the last position.
SELECT (c.page_count - f.freelist_count) * s.page_size,
    (SELECT coalesce(min(position), 1) FROM ended_lease), (SELECT coalesce(max(position), 0) FROM ended_lease)
FROM pragma_page_count() AS c, pragma_freelist_count() AS f, pragma_page_size() AS s;

-- name: note_pruned
-- Runs before pruning. It notes the latest end, not that of the last row: wall clocks are sometimes set back.
UPDATE pool SET complete_since = (
    SELECT max(at) FROM (
        SELECT complete_since AS at FROM pool UNION ALL SELECT ended_at FROM ended_lease WHERE position <= ?
    )
);

-- name: prune_ended
-- By position, because counting would scan all rows.
DELETE FROM ended_lease WHERE position <= ?;

-- name: complete_since
SELECT complete_since FROM pool;

-- name: usage
-- Arguments: now; spans as JSON, each with since and until (null: open); live leases as JSON, each with id, owner, number of
-- GPUs, whether it shares them, and the times of request and grant; a node, or NULL for all.
-- By the index on ended_at. If a clock was set, any of the three times may be the first. Unknown end times are included.
WITH span AS (
    SELECT key AS number, json_extract(value, '$[0]') AS since, coalesce(json_extract(value, '$[1]'), 9e999) AS until, ?1 AS now
    FROM json_each(?2)
),
live AS (
    SELECT json_extract(value, '$[0]') AS lease_id, json_extract(value, '$[1]') AS owner,
        json_extract(value, '$[2]') AS gpu_count, json_extract(value, '$[3]') AS is_shared,
        json_extract(value, '$[4]') AS requested_at, json_extract(value, '$[5]') AS granted_at
    FROM json_each(?3)
),
lease AS (
    SELECT number, since, until, now, owner,
        CASE WHEN ?4 IS NULL THEN gpu_count
            ELSE (SELECT count(*) FROM json_each(gpus) WHERE json_extract(value, '$[0]') = ?4)
        END AS gpu_count,
        memory_mb IS NOT NULL AS is_shared, requested_at, granted_at, ended_at, reason, mean_utilization_percent,
        FALSE AS is_live
    FROM span CROSS JOIN ended_lease
    WHERE (ended_at >= since AND (ended_at < until OR requested_at < until OR granted_at < until) OR ended_at IS NULL)
        AND (lease_id, requested_at) NOT IN (SELECT lease_id, requested_at FROM live)
        AND (?4 IS NULL OR EXISTS (SELECT * FROM json_each(gpus) WHERE json_extract(value, '$[0]') = ?4))
    UNION ALL
    SELECT number, since, until, now, owner, gpu_count, is_shared, requested_at, granted_at, now, NULL, NULL, TRUE
    FROM span CROSS JOIN live
)

-- name: read_held
-- Arguments: since, now, live leases as above, a node or NULL, a number. Leases that held GPUs and ended in between, last one
-- first, by the index on ended_at.
SELECT body FROM ended_lease
WHERE ended_at BETWEEN ?1 AND ?2 AND gpu_count > 0 AND granted_at BETWEEN 0 AND ended_at
    AND (lease_id, requested_at) NOT IN (
        SELECT json_extract(value, '$[0]'), json_extract(value, '$[4]') FROM json_each(?3)
    )
    AND (?4 IS NULL OR EXISTS (SELECT * FROM json_each(gpus) WHERE json_extract(value, '$[0]') = ?4))
ORDER BY ended_at DESC LIMIT ?5;

-- name: count_unknown_holds
-- Arguments: since, now, live leases as above. Leases that held GPUs, ended since then or at an unknown time, and are not among
-- those above.
SELECT count(*) FROM ended_lease
WHERE (ended_at >= ?1 OR ended_at IS NULL) AND gpu_count > 0
    AND NOT coalesce(ended_at <= ?2 AND granted_at BETWEEN 0 AND ended_at, FALSE)
    AND (lease_id, requested_at) NOT IN (
        SELECT json_extract(value, '$[0]'), json_extract(value, '$[4]') FROM json_each(?3)
    );
