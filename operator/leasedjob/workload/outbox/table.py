"""The table `leasedjob_outbox`, and every statement about it.

    put in ──► pending ──► published ──► pruned
                 │  ▲
         refused │  │ its time has come, or it was put back
                 ▼  │
       waits (next_try_at) ──► parked

It lives in the database that the application's work changes, in the first schema of the search path. No statement
needs a session (LISTEN, SET, prepared names, session locks), so PgBouncer's transaction mode is enough.

A *lane* is the rows of one topic and partition key, as a number; rows without a partition key are in no lane. A relay
locks a lane for the length of its transaction, with an advisory lock, before it looks at the lane's rows: row locks
alone would let another relay skip a row that is being published, and publish the one behind it.
"""

from __future__ import annotations

from typing import Final, LiteralString

# One statement, so that every driver takes it. It looks first, since a role that may only use the table can't even ask
# "CREATE TABLE IF NOT EXISTS"; and it locks, since two of those at once would fail.
INSTALL: Final[LiteralString] = """
DO $outbox$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('leasedjob_outbox', 0));
    IF to_regclass('leasedjob_outbox') IS NULL THEN
        CREATE TABLE leasedjob_outbox (
            id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            idempotency_key text NOT NULL UNIQUE,
            type            text NOT NULL,
            topic           text NOT NULL,
            partition_key   text,
            payload         jsonb NOT NULL,
            headers         jsonb NOT NULL DEFAULT '{}',
            created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
            published_at    timestamptz,
            tries           integer NOT NULL DEFAULT 0,
            next_try_at     timestamptz,
            parked_at       timestamptz,
            error           text,
            lane            bigint GENERATED ALWAYS AS
                            (hashtextextended(partition_key, hashtextextended(topic, 0))) STORED
        );
        CREATE INDEX leasedjob_outbox_pending ON leasedjob_outbox (id)
            WHERE published_at IS NULL AND parked_at IS NULL;
        CREATE INDEX leasedjob_outbox_waiting ON leasedjob_outbox (next_try_at)
            WHERE published_at IS NULL AND parked_at IS NULL AND next_try_at IS NOT NULL;
        CREATE INDEX leasedjob_outbox_parked ON leasedjob_outbox (id) WHERE parked_at IS NOT NULL;
        CREATE INDEX leasedjob_outbox_published ON leasedjob_outbox (published_at) WHERE published_at IS NOT NULL;
    END IF;
END
$outbox$"""

# --- putting in ------------------------------------------------------------------------------------------------------

ENQUEUE: Final[LiteralString] = """
INSERT INTO leasedjob_outbox (idempotency_key, type, topic, partition_key, payload, headers)
VALUES (CAST(%(key)s AS text), CAST(%(type)s AS text), CAST(%(topic)s AS text), CAST(%(partition_key)s AS text),
        CAST(CAST(%(payload)s AS text) AS jsonb), CAST(CAST(%(headers)s AS text) AS jsonb))
    ON CONFLICT (idempotency_key) DO NOTHING
RETURNING id"""
# The names of the columns in which what was put in under this key is another message.
DIFFERENT: Final[LiteralString] = """
SELECT array_remove(ARRAY[
           CASE WHEN type <> CAST(%(type)s AS text) THEN 'type' END,
           CASE WHEN payload <> CAST(CAST(%(payload)s AS text) AS jsonb) THEN 'payload' END,
           CASE WHEN topic <> CAST(%(topic)s AS text) THEN 'topic' END,
           CASE WHEN partition_key IS DISTINCT FROM CAST(%(partition_key)s AS text) THEN 'partition_key' END], NULL)
  FROM leasedjob_outbox
 WHERE idempotency_key = CAST(%(key)s AS text)"""

# --- the relay's transaction -----------------------------------------------------------------------------------------

# Which lanes the rows at the front are in, and whether we have got them; null stands for the rows in no lane. A lane
# with a row that waits waits as a whole. `others`: lanes that we didn't get.
LANES: Final[LiteralString] = """
WITH settings AS MATERIALIZED (
    SELECT set_config('idle_in_transaction_session_timeout', CAST(%(idle)s AS text), true)
), waiting AS MATERIALIZED (
    SELECT DISTINCT lane
      FROM leasedjob_outbox
     WHERE published_at IS NULL AND parked_at IS NULL AND next_try_at > statement_timestamp() AND lane IS NOT NULL
), front AS MATERIALIZED (
    SELECT lane
      FROM leasedjob_outbox
     WHERE published_at IS NULL AND parked_at IS NULL
       AND (next_try_at IS NULL OR next_try_at <= statement_timestamp())
       AND (CAST(%(topics)s AS text[]) IS NULL OR topic = ANY (CAST(%(topics)s AS text[])))
       AND (lane IS NULL OR (lane NOT IN (SELECT lane FROM waiting) AND lane <> ALL (CAST(%(others)s AS bigint[]))))
     ORDER BY id
     LIMIT CAST(%(batch)s AS bigint)
)
SELECT lane,
       lane IS NULL OR pg_try_advisory_xact_lock(
           lane # hashtextextended('leasedjob_outbox', CAST('leasedjob_outbox' AS regclass)::bigint))
  FROM (SELECT DISTINCT lane FROM front) AS lanes, settings"""
# A statement of its own, after the lanes are ours: one that began before would still see rows as pending that their
# former owner has published, or has found to be refused, and would publish the row behind.
CLAIM: Final[LiteralString] = """
WITH waiting AS MATERIALIZED (
    SELECT DISTINCT lane
      FROM leasedjob_outbox
     WHERE published_at IS NULL AND parked_at IS NULL AND next_try_at > statement_timestamp() AND lane IS NOT NULL
)
SELECT id, idempotency_key, type, CAST(payload AS text), topic, partition_key, CAST(headers AS text), created_at, tries
  FROM leasedjob_outbox
 WHERE published_at IS NULL AND parked_at IS NULL
   AND (next_try_at IS NULL OR next_try_at <= statement_timestamp())
   AND (CAST(%(topics)s AS text[]) IS NULL OR topic = ANY (CAST(%(topics)s AS text[])))
   AND (lane IS NULL OR (lane = ANY (CAST(%(lanes)s AS bigint[])) AND lane NOT IN (SELECT lane FROM waiting)))
 ORDER BY id
 LIMIT CAST(%(batch)s AS bigint)
   FOR UPDATE SKIP LOCKED"""
MARK: Final[LiteralString] = """
UPDATE leasedjob_outbox
   SET published_at = clock_timestamp(), next_try_at = NULL
 WHERE id = ANY (CAST(%(ids)s AS bigint[]))"""
# Without a time to wait for the row is parked.
HOLD: Final[LiteralString] = """
UPDATE leasedjob_outbox AS o
   SET tries = f.tries, error = f.error,
       next_try_at = clock_timestamp() + f.wait * interval '1 second',
       parked_at = CASE WHEN f.wait IS NULL THEN clock_timestamp() END
  FROM unnest(CAST(%(ids)s AS bigint[]), CAST(%(tries)s AS integer[]), CAST(%(waits)s AS float8[]),
              CAST(%(errors)s AS text[])) AS f (id, tries, wait, error)
 WHERE o.id = f.id"""

# --- looking after it ------------------------------------------------------------------------------------------------

PARKED: Final[LiteralString] = """
SELECT id, idempotency_key, type, topic, partition_key, CAST(payload AS text), created_at, parked_at, tries, error
  FROM leasedjob_outbox
 WHERE parked_at IS NOT NULL
 ORDER BY id
 LIMIT CAST(%(limit)s AS bigint)"""
PUT_BACK: Final[LiteralString] = """
WITH back AS (
    UPDATE leasedjob_outbox
       SET parked_at = NULL, tries = 0, next_try_at = NULL
     WHERE parked_at IS NOT NULL
       AND (CAST(%(keys)s AS text[]) IS NULL OR idempotency_key = ANY (CAST(%(keys)s AS text[])))
    RETURNING 1
)
SELECT count(*) FROM back"""
PRUNE: Final[LiteralString] = """
WITH gone AS (
    DELETE FROM leasedjob_outbox
     WHERE id IN (SELECT id
                    FROM leasedjob_outbox
                   WHERE published_at < statement_timestamp() - CAST(%(age)s AS interval)
                   ORDER BY published_at
                   LIMIT CAST(%(limit)s AS bigint)
                     FOR UPDATE SKIP LOCKED)
    RETURNING 1
)
SELECT count(*) FROM gone"""
STATUS: Final[LiteralString] = """
SELECT to_do.pending, to_do.waiting, aside.parked, to_do.lag
  FROM (SELECT count(*) AS pending,
               count(*) FILTER (WHERE next_try_at > statement_timestamp()) AS waiting,
               CAST(extract(epoch FROM statement_timestamp() - min(created_at)) AS float8) AS lag
          FROM leasedjob_outbox
         WHERE published_at IS NULL AND parked_at IS NULL
           AND (CAST(%(topics)s AS text[]) IS NULL OR topic = ANY (CAST(%(topics)s AS text[])))) AS to_do,
       (SELECT count(*) AS parked
          FROM leasedjob_outbox
         WHERE parked_at IS NOT NULL
           AND (CAST(%(topics)s AS text[]) IS NULL OR topic = ANY (CAST(%(topics)s AS text[])))) AS aside"""
