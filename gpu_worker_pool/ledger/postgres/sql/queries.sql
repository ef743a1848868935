-- The queries of the PostgreSQL journal. Each is loaded by the name above it. Most have the pool as the first argument.


-- name: read_tables
-- Not by to_regclass: its cache does not yet know what another candidate did while this one waited for the lock.
SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = 'gpu_pool';

-- name: read_version
SELECT version FROM gpu_pool.format;

-- name: lock_creation
-- The candidates of a fleet may start at once. The lock ends with the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('gpu_pool', 0));

-- name: read_pools
SELECT pool, pool_id FROM gpu_pool.pool ORDER BY pool;

-- name: create_pool
INSERT INTO gpu_pool.pool (pool, pool_id) VALUES ($1, $2);

-- name: name_pool
-- Further arguments: its identity, and since when its ended leases are complete.
UPDATE gpu_pool.pool SET pool_id = $2, complete_since = $3 WHERE pool = $1;

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
    extract(epoch FROM clock_timestamp())::double precision AS wall_now
FROM gpu_pool.leader WHERE pool = $1;

-- name: claim
-- Further arguments: for how long, term, holder, url, the highest epoch seen. An end that is further away than any leader
-- can have set it comes from a clock that was set back or from another machine's clock: it does not count.
UPDATE gpu_pool.leader
SET epoch = greatest(epoch, $6) + 1, term = $3, holder = $4, url = $5,
    expires_at = clock_timestamp() + $2::double precision * interval '1 second'
WHERE pool = $1 AND (
    expires_at <= clock_timestamp()
    OR expires_at > clock_timestamp() + 2 * $2::double precision * interval '1 second'
)
RETURNING epoch, term, holder, url, head, batch, crc,
    $2::double precision AS expires_in_s,
    extract(epoch FROM clock_timestamp())::double precision AS wall_now;

-- name: renew
-- Further arguments: for how long, epoch, term.
UPDATE gpu_pool.leader
SET expires_at = clock_timestamp() + $2::double precision * interval '1 second'
WHERE pool = $1 AND epoch = $3 AND term = $4 AND expires_at > clock_timestamp()
RETURNING epoch, term, holder, url, head, batch, crc,
    $2::double precision AS expires_in_s,
    extract(epoch FROM clock_timestamp())::double precision AS wall_now;

-- name: hand_over
-- Further arguments: epoch, term. Without a term, an append that is still on its way changes nothing.
UPDATE gpu_pool.leader SET term = NULL, expires_at = 'epoch' WHERE pool = $1 AND epoch = $2 AND term = $3;

-- name: append
-- Further arguments: for how long, epoch, term; the journal's end, position and crc, before and after; the batch; the events,
-- one a line, each after its crc and a space; the ended leases as JSON. One text for all events costs a tenth of what an
-- array costs. A lease that is already there is replaced, and counts as the latest again.
WITH fence AS (
    UPDATE gpu_pool.leader
    SET head = $7, crc = $8, batch = $9, expires_at = clock_timestamp() + $2::double precision * interval '1 second'
    WHERE pool = $1 AND epoch = $3 AND term = $4 AND head = $5 AND crc = $6
    RETURNING head
),
events AS (
    INSERT INTO gpu_pool.event (pool, position, epoch, body, crc)
    SELECT $1, $5 + line.ordinal, $3, substr(line.text, strpos(line.text, ' ') + 1),
        split_part(line.text, ' ', 1)::bigint
    FROM fence, unnest(string_to_array($10::text, E'\n')) WITH ORDINALITY AS line (text, ordinal)
),
ended AS (
    INSERT INTO gpu_pool.ended_lease (
        pool, body, crc, lease_id, owner, gpus, is_shared, requested_at, granted_at, ended_at, reason,
        mean_utilization_percent
    )
    SELECT $1, body, crc, lease_id, owner, gpus, is_shared, requested_at, granted_at, ended_at, reason,
        mean_utilization_percent
    FROM fence, json_to_recordset($11::text::json) AS lease (
        body text, crc bigint, lease_id text, owner text, gpus jsonb, is_shared boolean, requested_at double precision,
        granted_at double precision, ended_at double precision, reason text, mean_utilization_percent double precision
    )
    ON CONFLICT (pool, lease_id, requested_at) DO UPDATE SET
        position = excluded.position, body = excluded.body, crc = excluded.crc, owner = excluded.owner,
        gpus = excluded.gpus, is_shared = excluded.is_shared, granted_at = excluded.granted_at,
        ended_at = excluded.ended_at, reason = excluded.reason,
        mean_utilization_percent = excluded.mean_utilization_percent
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
SELECT crc, body, body_crc FROM gpu_pool.snapshot WHERE pool = $1 AND position = $2;

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
-- Further arguments: how many ended leases stay, how many go at once. The position of the last one to prune now; no row if
-- there are not too many.
SELECT least(
    position, (SELECT min(position) FROM gpu_pool.ended_lease WHERE pool = $1) + $3::bigint - 1
) FROM gpu_pool.ended_lease WHERE pool = $1 ORDER BY position DESC OFFSET $2 LIMIT 1;

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

-- name: usage
-- Further arguments: now; spans as JSON, each with since and until (null: open); live leases as JSON, each with id, owner,
-- number of GPUs, whether it shares them, and the times of request and grant; a node, or NULL for all.
-- By the index on ended_at. If a clock was set, any of the three times may be the first. Unknown end times are included.
WITH span AS (
    SELECT ordinal - 1 AS number, (value ->> 0)::double precision AS since,
        coalesce((value ->> 1)::double precision, 'Infinity') AS until, $2::double precision AS now
    FROM json_array_elements($3::text::json) WITH ORDINALITY AS span (value, ordinal)
),
live AS (
    SELECT value ->> 0 AS lease_id, value ->> 1 AS owner, (value ->> 2)::integer AS gpu_count,
        (value ->> 3)::boolean AS is_shared, (value ->> 4)::double precision AS requested_at,
        (value ->> 5)::double precision AS granted_at
    FROM json_array_elements($4::text::json) AS live (value)
),
lease AS (
    SELECT number, since, until, now, owner,
        CASE WHEN $5::text IS NULL THEN gpu_count
            ELSE (SELECT count(*)::integer FROM jsonb_array_elements(gpus) AS key WHERE key ->> 0 = $5)
        END AS gpu_count,
        is_shared, requested_at, granted_at, ended_at, reason, mean_utilization_percent, FALSE AS is_live
    FROM span JOIN gpu_pool.ended_lease
        ON ended_at >= since AND (ended_at < until OR requested_at < until OR granted_at < until) OR ended_at IS NULL
    WHERE pool = $1
        AND NOT EXISTS (
            SELECT FROM live WHERE live.lease_id = ended_lease.lease_id AND live.requested_at = ended_lease.requested_at
        )
        AND ($5::text IS NULL OR EXISTS (SELECT FROM jsonb_array_elements(gpus) AS key WHERE key ->> 0 = $5))
    UNION ALL
    SELECT number, since, until, now, owner, gpu_count, is_shared, requested_at, granted_at, now, NULL, NULL, TRUE
    FROM span CROSS JOIN live
)

-- name: read_held
-- Further arguments: since, now, live leases as above, a node or NULL, a number. Leases that held GPUs and ended in between,
-- last one first, by the index on ended_at.
SELECT body FROM gpu_pool.ended_lease
WHERE pool = $1 AND ended_at BETWEEN $2 AND $3 AND gpu_count > 0 AND granted_at BETWEEN 0 AND ended_at
    AND NOT EXISTS (
        SELECT FROM json_array_elements($4::text::json) AS live
        WHERE live ->> 0 = lease_id AND (live ->> 4)::double precision = requested_at
    )
    AND ($5::text IS NULL OR EXISTS (SELECT FROM jsonb_array_elements(gpus) AS key WHERE key ->> 0 = $5))
ORDER BY ended_at DESC LIMIT $6;

-- name: count_unknown_holds
-- Further arguments: since, now, live leases as above. Leases that held GPUs, ended since then or at an unknown time, and are
-- not among those above.
SELECT count(*) FROM gpu_pool.ended_lease
WHERE pool = $1 AND (ended_at >= $2 OR ended_at IS NULL) AND gpu_count > 0
    AND NOT coalesce(ended_at <= $3 AND granted_at BETWEEN 0 AND ended_at, FALSE)
    AND NOT EXISTS (
        SELECT FROM json_array_elements($4::text::json) AS live
        WHERE live ->> 0 = lease_id AND (live ->> 4)::double precision = requested_at
    );
