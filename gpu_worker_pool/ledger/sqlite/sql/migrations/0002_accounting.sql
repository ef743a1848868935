-- One row: what is known of ended leases is complete for all that ended after this (seconds since 1970); what ended
-- before was pruned, or lost with a damaged file. NULL: nothing was ever taken away.
CREATE TABLE accounting (
    complete_since REAL
);
-- Where some were pruned before this was noted, those with the lowest positions are gone.
INSERT INTO accounting (complete_since)
SELECT CASE WHEN min(position) > 1 THEN ended_at END FROM ended_lease;
