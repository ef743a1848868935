-- What the accounting of both databases has in common. Each part is loaded by the name above it.


-- name: usage_totals
-- Follows on a WITH whose last part is `lease`: a row for each lease and span, with the span's `number`, `since` and `until`,
-- and with `now`. A lease that is live ends now. A time that is unknown, or runs backwards because a clock was set, is never
-- taken for 0: such leases are counted apart, in the span in which they ended. If that is unknown too, in every span.
, timed AS (
    SELECT number, owner, gpu_count, is_shared, is_live, reason, mean_utilization_percent,
        ended_at IS NULL OR (ended_at >= since AND ended_at < until) AS has_ended_within,
        granted_at IS NOT NULL OR gpu_count > 0 AS has_held,
        coalesce(granted_at <= ended_at AND ended_at <= now, FALSE) AS is_hold_known,
        granted_at < until AND (ended_at > since OR granted_at >= since) AS has_held_within,
        CASE WHEN ended_at < until AND ended_at < now THEN ended_at WHEN until < now THEN until ELSE now END
            - CASE WHEN granted_at > since THEN granted_at ELSE since END AS held_s,
        coalesce(
            requested_at <= left_queue_at AND left_queue_at <= ended_at AND ended_at <= now, FALSE
        ) AS is_wait_known,
        CASE WHEN left_queue_at < until AND left_queue_at < now THEN left_queue_at WHEN until < now THEN until ELSE now END
            - CASE WHEN requested_at > since THEN requested_at ELSE since END AS waited_s
    FROM (
        SELECT *, CASE WHEN granted_at IS NOT NULL OR gpu_count > 0 THEN granted_at ELSE ended_at END AS left_queue_at
        FROM lease
    ) AS queued
),
totals AS (
    SELECT number, owner,
        coalesce(sum(held_s * gpu_count) FILTER (WHERE is_held AND NOT is_shared AND held_s > 0), 0.0) AS gpu_s,
        coalesce(sum(held_s * gpu_count) FILTER (WHERE is_held AND is_shared AND held_s > 0), 0.0) AS shared_gpu_s,
        count(*) FILTER (WHERE is_held) AS leases,
        count(*) FILTER (WHERE is_held AND is_live) AS running,
        coalesce(max(held_s) FILTER (WHERE is_held AND held_s > 0), 0.0) AS longest_s,
        coalesce(sum(waited_s) FILTER (WHERE is_wait_known AND waited_s > 0), 0.0) AS wait_s,
        count(*) FILTER (WHERE has_held AND NOT is_hold_known AND has_ended_within) AS unknown_leases,
        count(*) FILTER (WHERE NOT is_wait_known AND has_ended_within) AS unknown_waits,
        count(*) FILTER (WHERE is_held AND has_ended_within AND reason = 'time_limit') AS time_limit_ends,
        count(*) FILTER (WHERE is_held AND has_ended_within AND reason = 'preempted') AS preempted_ends,
        count(*) FILTER (WHERE is_held AND has_ended_within AND reason = 'idle') AS idle_ends,
        coalesce(sum(held_s * gpu_count) FILTER (WHERE is_measured AND held_s > 0), 0.0) AS measured_gpu_s,
        coalesce(sum(held_s * gpu_count * mean_utilization_percent / 100) FILTER (WHERE is_measured AND held_s > 0), 0.0)
            AS busy_gpu_s
    FROM (
        SELECT *, is_held AND mean_utilization_percent IS NOT NULL AS is_measured
        FROM (SELECT *, has_held AND is_hold_known AND has_held_within AS is_held FROM timed) AS known
    ) AS held
    GROUP BY number, owner
)
SELECT * FROM totals WHERE leases > 0 OR wait_s > 0 OR unknown_leases > 0 OR unknown_waits > 0 ORDER BY number;
