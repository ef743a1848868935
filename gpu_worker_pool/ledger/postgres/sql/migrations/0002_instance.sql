-- When the server started on which the leader last wrote, in seconds since 1970: it tells a failover, and a restart. NULL:
-- not known.
ALTER TABLE gpu_pool.leader ADD COLUMN instance double precision;
