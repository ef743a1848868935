-- The queries of the PostgreSQL journal. Each is loaded by the name above it. Most have the pool as the first argument.


-- name: has_version
-- Not by to_regclass: its cache does not yet know what another candidate did while this one waited for the lock.
SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = 'gpu_pool' AND tablename = 'schema_version');

-- name: read_version
SELECT version FROM gpu_pool.schema_version;

-- name: set_version
UPDATE gpu_pool.schema_version SET version = $1;

-- name: lock_migration
-- The candidates of a fleet may start at once. The lock ends with the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('gpu_pool', 0));

-- name: read_pools
SELECT pool, pool_id FROM gpu_pool.pool ORDER BY pool;

-- name: create_pool
INSERT INTO gpu_pool.pool (pool, pool_id) VALUES ($1, $2);

-- name: create_leader
INSERT INTO gpu_pool.leader (pool) VALUES ($1);

-- name: be_durable
-- Where an administrator has turned it off for all, a crash of the server would take back what clients were told.
SELECT set_config('synchronous_commit', 'on', FALSE) WHERE current_setting('synchronous_commit') = 'off';

-- name: read_leader
-- Further argument: for how long a leadership lasts. See `claim` for an end that is too far away.
SELECT epoch, term, holder, url, head, batch, crc,
    CASE
        WHEN expires_at > clock_timestamp() + 2 * $2::double precision * interval '1 second' THEN 0.0
        ELSE extract(epoch FROM expires_at - clock_timestamp())
    END::double precision AS expires_in_s,
    extract(epoch FROM clock_timestamp())::double precision AS wall_now,
    coalesce(instance <> extract(epoch FROM pg_postmaster_start_time())::double precision, FALSE) AS has_moved
FROM gpu_pool.leader WHERE pool = $1;

-- name: claim
-- Further arguments: for how long, term, holder, url, the highest epoch seen. An end that is further away than any leader
-- can have set it comes from a clock that was set back or from another machine's clock: it does not count.
WITH claimed AS (
    UPDATE gpu_pool.leader
    SET epoch = greatest(epoch, $6) + 1, term = $3, holder = $4, url = $5,
        instance = extract(epoch FROM pg_postmaster_start_time()),
        expires_at = clock_timestamp() + $2::double precision * interval '1 second'
    WHERE pool = $1 AND (
        expires_at <= clock_timestamp()
        OR expires_at > clock_timestamp() + 2 * $2::double precision * interval '1 second'
    )
    RETURNING *
)
SELECT epoch, term, holder, url, head, batch, crc,
    $2::double precision AS expires_in_s,
    extract(epoch FROM clock_timestamp())::double precision AS wall_now,
    FALSE AS has_moved,
    pg_notify('gpu_pool', pool)
FROM claimed;

-- name: renew
-- Further arguments: for how long, epoch, term.
UPDATE gpu_pool.leader
SET expires_at = clock_timestamp() + $2::double precision * interval '1 second', instance = extract(epoch FROM pg_postmaster_start_time())
WHERE pool = $1 AND epoch = $3 AND term = $4 AND expires_at > clock_timestamp()
RETURNING epoch, term, holder, url, head, batch, crc,
    $2::double precision AS expires_in_s,
    extract(epoch FROM clock_timestamp())::double precision AS wall_now,
    FALSE AS has_moved;

-- name: hand_over
-- Further arguments: epoch, term. Without a term, an append that is still on its way changes nothing.
WITH left_by AS (
    UPDATE gpu_pool.leader SET term = NULL, expires_at = 'epoch'
    WHERE pool = $1 AND epoch = $2 AND term = $3
    RETURNING pool
)
SELECT pg_notify('gpu_pool', pool) FROM left_by;

-- name: append
-- Further arguments: for how long, epoch, term, head; the number of events, the last one's crc, the batch; the events, one
-- a line, each after its crc and a space; the ended leases as JSON. One text for all events costs a tenth of what an
-- array costs. A lease that is already there is replaced, and counts as the latest again.
WITH fence AS (
    UPDATE gpu_pool.leader
    SET head = head + $6::bigint, crc = $7, batch = $8, instance = extract(epoch FROM pg_postmaster_start_time()),
        expires_at = clock_timestamp() + $2::double precision * interval '1 second'
    WHERE pool = $1 AND epoch = $3 AND term = $4 AND head = $5
    RETURNING head
),
events AS (
    INSERT INTO gpu_pool.event (pool, position, epoch, body, crc)
    SELECT $1, $5 + line.ordinal, $3, substr(line.text, strpos(line.text, ' ') + 1),
        split_part(line.text, ' ', 1)::bigint
    FROM fence, unnest(string_to_array($9::text, E'\n')) WITH ORDINALITY AS line (text, ordinal)
),
ended AS (
    INSERT INTO gpu_pool.ended_lease (
        pool, lease_id, owner, worker_id, host, gpu_count, memory_mb, fence,
        requested_at, granted_at, ended_at, reason, gpus, body, crc
    )
    SELECT $1, lease_id, owner, worker_id, host, gpu_count, memory_mb, lease.fence,
        requested_at, granted_at, ended_at, reason, gpus, body, crc
    FROM fence, json_to_recordset($10::text::json) AS lease (
        lease_id text, owner text, worker_id text, host text, gpu_count integer, memory_mb double precision,
        fence bigint, requested_at double precision, granted_at double precision, ended_at double precision,
        reason text, gpus text, body text, crc bigint
    )
    ON CONFLICT (pool, lease_id) DO UPDATE SET
        position = excluded.position, owner = excluded.owner, worker_id = excluded.worker_id, host = excluded.host,
        gpu_count = excluded.gpu_count, memory_mb = excluded.memory_mb, fence = excluded.fence,
        requested_at = excluded.requested_at, granted_at = excluded.granted_at, ended_at = excluded.ended_at,
        reason = excluded.reason, gpus = excluded.gpus, body = excluded.body, crc = excluded.crc
)
SELECT head FROM fence;

-- name: crc_at
-- Further argument: a position. No row if the event is not there and no snapshot replaces it.
SELECT crc FROM gpu_pool.event WHERE pool = $1 AND position = $2
UNION ALL
SELECT crc FROM gpu_pool.snapshot WHERE pool = $1 AND position = $2
LIMIT 1;

-- name: read_events
-- Further arguments: the first position, the number of rows. One statement, so that the head belongs to the events.
-- Without events, one row that has only the head. `crc_before`: that of the event before, if a snapshot replaces it.
SELECT leader.head, event.position, event.epoch, event.body, event.crc, snapshot.crc AS crc_before
FROM gpu_pool.leader
LEFT JOIN LATERAL (
    SELECT * FROM gpu_pool.event
    WHERE event.pool = leader.pool AND event.position >= $2 ORDER BY event.position LIMIT $3
) AS event ON TRUE
LEFT JOIN gpu_pool.snapshot ON snapshot.pool = event.pool AND snapshot.position = event.position - 1
WHERE leader.pool = $1
ORDER BY event.position;

-- name: first_position
SELECT position FROM gpu_pool.event WHERE pool = $1 ORDER BY position LIMIT 1;

-- name: snapshot_positions
SELECT position FROM gpu_pool.snapshot WHERE pool = $1 ORDER BY position DESC;

-- name: read_snapshot
SELECT body, body_crc FROM gpu_pool.snapshot WHERE pool = $1 AND position = $2;

-- name: write_snapshot
-- Further arguments: position, crc, body, its crc.
INSERT INTO gpu_pool.snapshot (pool, position, crc, body, body_crc) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (pool, position) DO UPDATE SET crc = excluded.crc, body = excluded.body, body_crc = excluded.body_crc;

-- name: prune_snapshots
-- The two newest stay. If the newest is damaged, the other one and the events after it are the whole history.
DELETE FROM gpu_pool.snapshot WHERE pool = $1 AND position < (
    SELECT min(position) FROM (
        SELECT position FROM gpu_pool.snapshot WHERE pool = $1 ORDER BY position DESC LIMIT 2
    ) AS newest
);

-- name: prune_events
-- Those that the second newest snapshot covers; none while there is only one.
DELETE FROM gpu_pool.event WHERE pool = $1 AND position <= (
    SELECT position FROM gpu_pool.snapshot WHERE pool = $1 ORDER BY position DESC OFFSET 1 LIMIT 1
);

-- name: last_pruned
-- Further argument: how many ended leases stay. The position of the last one to prune; no row if there are not so many.
SELECT position FROM gpu_pool.ended_lease WHERE pool = $1 ORDER BY position DESC OFFSET $2 LIMIT 1;

-- name: note_pruned
-- Runs before pruning. It notes the latest end, not that of the last row: wall clocks are sometimes set back.
UPDATE gpu_pool.pool SET complete_since = greatest(complete_since, (
    SELECT max(ended_at) FROM gpu_pool.ended_lease WHERE pool = $1 AND position <= $2
)) WHERE pool = $1;

-- name: prune_ended
DELETE FROM gpu_pool.ended_lease WHERE pool = $1 AND position <= $2;

-- name: read_last_ended
-- In the order of writing, not of ended_at: wall clocks are sometimes set back.
SELECT body, crc FROM (
    SELECT position, body, crc FROM gpu_pool.ended_lease WHERE pool = $1 ORDER BY position DESC LIMIT $2
) AS latest ORDER BY position;

-- name: complete_since
SELECT complete_since FROM gpu_pool.pool WHERE pool = $1;

-- name: read_ended_within
-- Further arguments: since and until. Leases that ended after `since` and were requested or granted before `until`, by the
-- index on ended_at. If a clock was set, any of the three times may be the first. Unknown end times are included.
-- Leases inside another lease are left out here and below: they are part of that one. A text in JSON cannot contain
-- the key with its quotes, so its presence in the body tells.
SELECT lease_id, owner, gpu_count, memory_mb IS NOT NULL, requested_at, granted_at, ended_at, reason, gpus
FROM gpu_pool.ended_lease
WHERE pool = $1 AND (ended_at >= $2 AND (ended_at < $3 OR requested_at < $3 OR granted_at < $3) OR ended_at IS NULL)
    AND strpos(body, '"parent":') = 0;

-- name: read_held_within
-- Further arguments: since and now. Leases that held GPUs and ended in between, last one first, by the index on ended_at.
SELECT lease_id, body FROM gpu_pool.ended_lease
WHERE pool = $1 AND ended_at BETWEEN $2 AND $3 AND gpu_count > 0 AND granted_at BETWEEN 0 AND ended_at
    AND strpos(body, '"parent":') = 0
ORDER BY ended_at DESC;

-- name: read_unknown_within
-- Further arguments: since and now. Leases that held GPUs, ended since then or at an unknown time, and are not among those
-- above.
SELECT lease_id FROM gpu_pool.ended_lease
WHERE pool = $1 AND (ended_at >= $2 OR ended_at IS NULL) AND gpu_count > 0
    AND NOT coalesce(ended_at <= $3 AND granted_at BETWEEN 0 AND ended_at, FALSE)
    AND strpos(body, '"parent":') = 0;
