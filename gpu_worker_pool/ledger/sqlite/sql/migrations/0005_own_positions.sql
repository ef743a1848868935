-- The journal numbers its events itself. SQLite's own sequence (AUTOINCREMENT) has a table, so each commit wrote one page more.
CREATE TABLE event_by_position (
    position INTEGER PRIMARY KEY,
    at REAL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    crc INTEGER NOT NULL
);
INSERT INTO event_by_position (position, at, kind, body, crc)
SELECT position, at, kind, body, crc FROM event ORDER BY position;
-- A journal that was compacted to no events has its last position only in the sequence.
UPDATE compaction SET compacted_to = (SELECT seq FROM sqlite_sequence WHERE name = 'event')
WHERE EXISTS (SELECT * FROM sqlite_sequence WHERE name = 'event') AND NOT EXISTS (SELECT * FROM event);
DROP TABLE event;
ALTER TABLE event_by_position RENAME TO event;
