-- Which schedules of a code are in force, and which were, in their own words: whoever passes ticks can say how many
-- they were, whoever's schedule they were of, and why; also when the schedule was edited while no operator ran.

ALTER TABLE leasedjob.job_registration ADD COLUMN schedule jsonb;
COMMENT ON COLUMN leasedjob.job_registration.schedule IS
    'What schedule_hash is of: all that decides which instants are ticks. NULL: a release that didn''t say it.';
ALTER TABLE leasedjob.job_code ADD COLUMN schedules_version bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN leasedjob.job_code.schedules_version IS
    'Grows with each change of what code_schedule has of the code. What was counted from another version is refused.';

CREATE TABLE leasedjob.code_schedule (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    code          text NOT NULL,
    schedule_hash text NOT NULL,
    schedule      jsonb,
    since         timestamptz NOT NULL,
    until         timestamptz,
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX code_schedule_in_force ON leasedjob.code_schedule (code, schedule_hash) WHERE until IS NULL;
CREATE INDEX code_schedule_since ON leasedjob.code_schedule (code, since);
CREATE INDEX code_schedule_changed ON leasedjob.code_schedule (changed_at);
COMMENT ON TABLE leasedjob.code_schedule IS
    'Ticks of a schedule in (since, until] are ticks of the code; until is NULL while it is in force.';
COMMENT ON COLUMN leasedjob.code_schedule.schedule IS 'As in job_registration; NULL: nobody knows what its ticks were.';

-- What is registered now. Its text follows with the first operator of this release that registers it.
INSERT INTO leasedjob.code_schedule (code, schedule_hash, since)
SELECT DISTINCT g.code, g.schedule_hash, c.watermark
  FROM leasedjob.job_registration g JOIN leasedjob.job_code c ON c.code = g.code
 WHERE NOT g.suspended
    OR NOT EXISTS (SELECT FROM leasedjob.job_registration o WHERE o.code = g.code AND NOT o.suspended);

-- Brings code_schedule up to date with the registrations of these codes, whose locks the caller holds. In force are the
-- schedules of clusters where the object isn't suspended, and where it is suspended in all of them, theirs. What comes
-- into force counts from p_at on, what has been counts until then.
CREATE FUNCTION leasedjob.put_in_force(p_codes text[], p_at timestamptz[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT a.code, a.at FROM unnest(p_codes, p_at) a (code, at)
    ), wanted AS MATERIALIZED (
        SELECT DISTINCT ON (a.code, g.schedule_hash) a.code, g.schedule_hash, g.schedule, a.at
          FROM asked a JOIN job_registration g ON g.code = a.code
         WHERE NOT g.suspended
            OR NOT EXISTS (SELECT FROM job_registration o WHERE o.code = a.code AND NOT o.suspended)
         ORDER BY a.code, g.schedule_hash, g.schedule IS NULL
    ), ended AS (
        UPDATE code_schedule s SET until = greatest(a.at, s.since), changed_at = clock_timestamp()
          FROM asked a
         WHERE s.code = a.code AND s.until IS NULL
           AND NOT EXISTS (SELECT FROM wanted w WHERE w.code = s.code AND w.schedule_hash = s.schedule_hash)
        RETURNING s.code
    ), told AS (
        UPDATE code_schedule s SET schedule = w.schedule, changed_at = clock_timestamp()
          FROM wanted w
         WHERE s.code = w.code AND s.schedule_hash = w.schedule_hash AND s.until IS NULL
           AND s.schedule IS NULL AND w.schedule IS NOT NULL
        RETURNING s.code
    ), begun AS (
        INSERT INTO code_schedule AS s (code, schedule_hash, schedule, since)
        SELECT w.code, w.schedule_hash, w.schedule, w.at
          FROM wanted w
         WHERE NOT EXISTS (SELECT FROM code_schedule o
                            WHERE o.code = w.code AND o.schedule_hash = w.schedule_hash AND o.until IS NULL)
         ORDER BY w.code, w.schedule_hash
        RETURNING s.code
    )
    UPDATE job_code c SET schedules_version = c.schedules_version + 1
     WHERE c.code IN (SELECT e.code FROM ended e
                       UNION ALL SELECT t.code FROM told t
                       UNION ALL SELECT b.code FROM begun b);
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- Registration
-- -------------------------------------------------------------------------------------------------------------------

-- `schedule`: see job_registration. `version`: the schedules_version that `passed` was computed from.
ALTER TYPE leasedjob.job_to_register ADD ATTRIBUTE schedule jsonb, ADD ATTRIBUTE version bigint;

CREATE OR REPLACE FUNCTION leasedjob.register_jobs(p_cluster text, p_jobs jsonb)
RETURNS TABLE (code text, busy boolean, watermark timestamptz, spec_differs boolean)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_jobs   job_to_register[];
    v_locked text[];
    v_at     timestamptz[];
    v_moves  boolean[];
    v_anew   text[];
BEGIN
    PERFORM require_read_committed();
    v_jobs := ARRAY(
        SELECT DISTINCT ON (j.code) j
          FROM jsonb_populate_recordset(NULL::job_to_register, p_jobs) j
         ORDER BY j.code, j.ordinal);

    INSERT INTO job_code (code, watermark)
    SELECT j.code, least(j.created_at, clock_timestamp())
      FROM unnest(v_jobs) j
     WHERE NOT EXISTS (SELECT FROM job_code c WHERE c.code = j.code)
     ORDER BY j.code
        ON CONFLICT DO NOTHING;

    v_locked := ARRAY(
        SELECT c.code FROM job_code c
         WHERE c.code IN (SELECT j.code FROM unnest(v_jobs) j)
         ORDER BY c.code FOR NO KEY UPDATE SKIP LOCKED);
    -- From when on the job's schedule counts, and whether the watermark goes there. Where another cluster is active
    -- with the code it stays: moving it could drop a tick that is about to be claimed there. (A release that
    -- doesn't say its schedule counts from the watermark alone, so an edit by it moves it as ever.)
    -- What was computed from an older watermark, from other schedules, or by a clock that is ahead, is not the truth;
    -- and whoever can say what is passed has to. Else to be asked again.
    SELECT coalesce(array_agg(d.code ORDER BY d.code), '{}'), coalesce(array_agg(d.at ORDER BY d.code), '{}'),
           coalesce(array_agg(d.moves ORDER BY d.code), '{}')
      INTO v_locked, v_at, v_moves
      FROM (SELECT j.code, j.passed, j.passed_at, j.version, j.schedule, c.watermark, c.schedules_version,
                   CASE WHEN NOT other.active AND g.uid IS DISTINCT FROM j.uid
                        THEN greatest(c.watermark, least(j.created_at, clock_timestamp()))
                        ELSE coalesce(j.passed_at, clock_timestamp()) END AS at,
                   CASE WHEN NOT other.active
                        THEN g.uid IS DISTINCT FROM j.uid OR (g.suspended AND NOT j.suspended)
                             OR g.schedule_hash <> j.schedule_hash
                        ELSE j.schedule IS NULL AND NOT other.same_schedule
                             AND g.schedule_hash <> j.schedule_hash END IS TRUE AS moves
              FROM unnest(v_jobs) j
              JOIN unnest(v_locked) l (code) ON l.code = j.code
              JOIN job_code c ON c.code = j.code
              LEFT JOIN job_registration g ON g.code = j.code AND g.cluster = p_cluster
             CROSS JOIN LATERAL (
                   SELECT count(*) > 0 AS active,
                          coalesce(bool_or(o.schedule_hash = j.schedule_hash), false) AS same_schedule
                     FROM job_registration o
                    WHERE o.code = j.code AND o.cluster <> p_cluster AND NOT o.suspended) other) d
     WHERE (d.passed IS NULL
            OR (d.passed_at <= clock_timestamp() AND NOT ranges_are_stale(d.watermark, d.passed)
                AND (d.version = d.schedules_version) IS NOT FALSE))
       AND NOT (d.schedule IS NOT NULL AND d.passed IS NULL AND d.moves AND d.at > d.watermark
                AND EXISTS (SELECT FROM code_schedule s
                             WHERE s.code = d.code AND (s.until IS NULL OR s.until > d.watermark)));

    -- Created anew: no other cluster has the code, and here it was absent or another object.
    v_anew := ARRAY(
        SELECT j.code
          FROM unnest(v_jobs) j JOIN unnest(v_locked) l (code) ON l.code = j.code
         WHERE NOT EXISTS (SELECT FROM job_registration g
                            WHERE g.code = j.code AND (g.cluster <> p_cluster OR g.uid = j.uid)));
    UPDATE job_scheduler s SET retry_at = NULL, reason = 'JobDeleted', changed_at = clock_timestamp()
     WHERE s.code = ANY (v_anew) AND s.status = 'FAIL' AND s.retry_at IS NOT NULL
       AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)  -- the index's predicate
       AND s.id IN (SELECT f.id FROM job_scheduler f
                     WHERE f.code = ANY (v_anew) AND (f.status = 'RUNNING' OR f.retry_at IS NOT NULL)
                       FOR NO KEY UPDATE SKIP LOCKED);
    -- Another object has another history: the failures of its predecessor don't hold it up.
    UPDATE job_code c
       SET suspended_at = NULL, resumed_at = clock_timestamp(), suspension_changed_at = clock_timestamp()
     WHERE c.code = ANY (v_anew) AND c.suspended_at IS NOT NULL;

    WITH moved AS MATERIALIZED (
        SELECT j.code, c.watermark AS before, j.passed, m.at
          FROM unnest(v_locked, v_at, v_moves) m (code, at, moves)
          JOIN unnest(v_jobs) j ON j.code = m.code
          JOIN job_code c ON c.code = m.code
         WHERE m.moves AND m.at > c.watermark
    ), written AS MATERIALIZED (
        SELECT m.code, write_ledger(p_cluster, m.code, m.before, m.passed)
          FROM moved m WHERE m.passed IS NOT NULL AND m.passed <> '[]'
    )
    UPDATE job_code c SET watermark = m.at
      FROM moved m LEFT JOIN written w ON w.code = m.code
     WHERE c.code = m.code;

    INSERT INTO job_registration AS g (code, cluster, namespace, name, uid, created_at, schedule_hash, spec_hash,
                                       policy, suspended, schedule)
    SELECT j.code, p_cluster, j.namespace, j.name, j.uid, j.created_at, j.schedule_hash, j.spec_hash, j.policy,
           j.suspended, j.schedule
      FROM unnest(v_jobs) j JOIN unnest(v_locked) l (code) ON l.code = j.code
     ORDER BY j.code
        ON CONFLICT (code, cluster) DO UPDATE
       SET namespace = excluded.namespace, name = excluded.name, uid = excluded.uid,
           created_at = excluded.created_at, schedule_hash = excluded.schedule_hash,
           spec_hash = excluded.spec_hash, policy = excluded.policy, suspended = excluded.suspended,
           -- What is known of a schedule stays known when a release registers it that doesn't say it.
           schedule = coalesce(excluded.schedule,
                               CASE WHEN g.schedule_hash = excluded.schedule_hash THEN g.schedule END),
           seen_at = clock_timestamp();
    PERFORM put_in_force(v_locked, v_at);

    RETURN QUERY
    SELECT j.code, l.code IS NULL, CASE WHEN l.code IS NOT NULL THEN c.watermark END,
           EXISTS (SELECT FROM job_registration o
                    WHERE o.code = j.code AND o.cluster <> p_cluster
                      AND (o.spec_hash <> j.spec_hash OR o.schedule_hash <> j.schedule_hash OR o.policy <> j.policy))
      FROM unnest(v_jobs) j
      LEFT JOIN unnest(v_locked) l (code) ON l.code = j.code
      LEFT JOIN job_code c ON c.code = j.code;
END $$;

CREATE OR REPLACE FUNCTION leasedjob.unregister_jobs(p_cluster text, p_codes text[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_locked text[];
    v_gone   text[];
    v_rows   uuid[];
BEGIN
    PERFORM require_read_committed();
    v_locked := ARRAY(
        SELECT c.code FROM job_code c WHERE c.code = ANY (p_codes) ORDER BY c.code FOR NO KEY UPDATE SKIP LOCKED);
    v_rows := ARRAY(
        SELECT s.id FROM job_scheduler s
         WHERE s.code = ANY (v_locked) AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)
         ORDER BY s.id FOR NO KEY UPDATE SKIP LOCKED);
    -- A code with a row that is locked elsewhere is left whole, so that asking again finishes it.
    v_locked := ARRAY(
        SELECT l.code FROM unnest(v_locked) l (code)
         WHERE NOT EXISTS (SELECT FROM job_scheduler s
                            WHERE s.code = l.code AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)
                              AND (s.status = 'FAIL' OR s.pod_uid IS NULL) AND s.id <> ALL (v_rows)));

    DELETE FROM job_registration g WHERE g.cluster = p_cluster AND g.code = ANY (v_locked);
    PERFORM put_in_force(v_locked, array_fill(clock_timestamp(), ARRAY[cardinality(v_locked)]));
    v_gone := ARRAY(
        SELECT l.code FROM unnest(v_locked) l (code)
         WHERE NOT EXISTS (SELECT FROM job_registration g WHERE g.code = l.code));

    -- Claims without a Pod that adopted them are given back; close_attempt leaves no retry where the code is gone.
    PERFORM close_attempt(s.id, 'release', false, 0, 'JobDeleted', NULL)
       FROM job_scheduler s
      WHERE s.code = ANY (v_locked) AND s.id = ANY (v_rows) AND s.status = 'RUNNING'
        AND s.pod_uid IS NULL AND s.cluster = p_cluster;
    UPDATE job_scheduler s SET retry_at = NULL, reason = 'JobDeleted', changed_at = clock_timestamp()
     WHERE s.code = ANY (v_gone) AND s.id = ANY (v_rows) AND s.status = 'FAIL' AND s.retry_at IS NOT NULL;

    RETURN ARRAY(
        SELECT p.code FROM unnest(p_codes) p (code)
         WHERE p.code = ANY (v_locked) OR NOT EXISTS (SELECT FROM job_code c WHERE c.code = p.code));
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- What moves the watermark says from which schedules it has counted
-- -------------------------------------------------------------------------------------------------------------------

ALTER TYPE leasedjob.claim_request ADD ATTRIBUTE version bigint;

CREATE OR REPLACE FUNCTION leasedjob.decide_claims(
    p_cluster text, p_requests leasedjob.claim_request[], p_locked jsonb, p_rows jsonb, p_waiting text[]
)
RETURNS TABLE (
    ordinal integer, type leasedjob.job_scheduler_type, code text, run_key text, lock_key text, tick timestamptz,
    name text, namespace text, job_name text, job_uid text, tenant text, lease_ms bigint, run_lease_ms bigint,
    backoff_limit integer, interruption_limit integer, manual boolean, dropped jsonb, action text, id uuid,
    attempt integer, fencing_token bigint, expires_at timestamptz, watermark timestamptz, reason text,
    retry_at timestamptz
)
LANGUAGE sql STABLE
BEGIN ATOMIC
SELECT r.ordinal, r.type, r.code, r.run_key, r.lock_key, r.tick, r.name, r.namespace, r.job_name, r.job_uid, r.tenant,
       r.lease_ms, r.run_lease_ms, r.backoff_limit, r.interruption_limit, r.manual, r.dropped, decided.action,
       s.id, s.attempt + s.attempt_gap, s.fencing_token,
       CASE WHEN s.status = 'RUNNING' THEN leasedjob.expires_at(s.modified_at, s.lease_ms) END,
       c.watermark,
       CASE WHEN decided.action = 'busy' THEN CASE
                WHEN NOT p_locked ? r.code THEN 'the code is locked'
                WHEN s.id IS NOT NULL THEN 'the lease row is locked'
                WHEN r.version <> c.schedules_version THEN 'the schedules changed'
                ELSE 'the watermark moved' END
            WHEN decided.action = 'end' AND s.stop_requested_at IS NULL THEN 'InterruptionLimit'
            WHEN decided.action = 'end' THEN s.stop_reason
            WHEN decided.action = 'overlap_wait' AND s.id IS NULL AND NOT r.manual AND c.suspended_at IS NOT NULL
                THEN 'SuspendedAfterFailures'
            WHEN decided.action = 'close' OR (decided.action = 'overlap_wait' AND restored.waiting) THEN 'Restored'
            ELSE coalesce(s.reason, '') END,
       s.retry_at
  FROM unnest(p_requests) r
 CROSS JOIN (SELECT max(x.as_of) AS as_of, coalesce(max(x.begins_at) > clock_timestamp(), false) AS waiting
               FROM leasedjob.restore x) restored
 CROSS JOIN LATERAL (SELECT CASE
       WHEN r.on_overlap IN ('skip', 'wait') THEN r.on_overlap
       -- The strictest policy of all clusters that are active with the code wins.
       ELSE (SELECT CASE WHEN bool_or(g.policy = 'Forbid') THEN CASE WHEN r.manual THEN 'wait' ELSE 'skip' END
                         WHEN bool_or(g.policy = 'Replace') THEN 'replace'
                         ELSE r.on_overlap END
               FROM leasedjob.job_registration g
              WHERE g.code = r.code AND g.cluster <> p_cluster AND NOT g.suspended) END AS on_overlap) rule
  LEFT JOIN leasedjob.job_code c ON c.code = r.code
  LEFT JOIN leasedjob.job_scheduler s ON s.lock_key = r.lock_key
  LEFT JOIN LATERAL (
       SELECT count(*) FILTER (WHERE o.status = 'RUNNING'
                  AND (NOT leasedjob.is_expired(o.modified_at, o.lease_ms) OR NOT p_rows ? o.id::text)) AS running,
              count(*) FILTER (WHERE o.status = 'FAIL') AS retrying
         FROM leasedjob.job_scheduler o
        WHERE o.code = r.code AND (o.status = 'RUNNING' OR o.retry_at IS NOT NULL)
          AND o.lock_key <> r.lock_key) others ON rule.on_overlap <> 'allow'
 CROSS JOIN LATERAL (SELECT CASE
       -- What nobody can claim now needs no lock to be known.
       WHEN s.status = 'SUCCESS' THEN 'completed'
       WHEN s.status = 'RUNNING' AND NOT leasedjob.is_expired(s.modified_at, s.lease_ms) THEN 'held'
       WHEN s.status = 'FAIL' AND s.retry_at IS NULL AND NOT (r.manual AND r.reopen) THEN 'exhausted'
       WHEN s.retry_at > clock_timestamp() AND NOT (r.manual AND r.reopen) THEN 'backoff'
       WHEN NOT EXISTS (SELECT FROM leasedjob.job_registration g
                         WHERE g.code = r.code AND g.cluster = p_cluster AND g.uid = r.job_uid) THEN 'unregistered'
       -- What is locked elsewhere is not decided now.
       WHEN NOT p_locked ? r.code OR NOT p_rows ? s.id::text THEN 'busy'
       WHEN s.id IS NULL THEN CASE
           WHEN r.tick > clock_timestamp() THEN 'future'
           WHEN NOT r.manual AND r.tick <= c.watermark THEN 'past'
           -- What it passes was counted from schedules that are not those of the code any more.
           WHEN NOT r.manual AND r.version <> c.schedules_version THEN 'busy'
           -- It may have run, and nobody knows any more.
           WHEN r.type = 'INITIAL' AND NOT r.manual
                AND (SELECT g.created_at FROM leasedjob.job_registration g
                      WHERE g.code = r.code AND g.cluster = p_cluster) <= restored.as_of THEN 'close'
           WHEN restored.waiting THEN 'overlap_wait'
           WHEN NOT r.manual AND r.tick IS NOT NULL AND c.suspended_at IS NOT NULL THEN 'overlap_wait'
           WHEN NOT r.manual AND r.code = ANY (p_waiting) THEN 'overlap_wait'
           WHEN r.dropped <> '[]' AND leasedjob.ranges_are_stale(c.watermark, r.dropped) THEN 'busy'
           WHEN NOT r.manual
                AND r.tick + r.starting_deadline_ms * interval '1 millisecond' < clock_timestamp() THEN 'missed'
           WHEN others.running + others.retrying > 0 THEN CASE
               WHEN rule.on_overlap = 'skip' AND NOT r.manual AND r.tick IS NOT NULL THEN 'overlap_skipped'
               WHEN rule.on_overlap = 'replace' THEN 'replace'
               ELSE 'overlap_wait' END
           ELSE 'insert' END
       WHEN s.status = 'RUNNING' AND s.stop_requested_at IS NOT NULL THEN 'end'
       WHEN s.status = 'RUNNING' AND s.pod_uid IS NOT NULL AND s.interruptions >= r.interruption_limit THEN 'end'
       -- A run that began before needs only the others to stand still: two runs that both wait for their retry must
       -- not wait for each other.
       WHEN others.running > 0 OR restored.waiting THEN 'overlap_wait'
       ELSE 'reclaim' END AS action) decided;
END;

CREATE FUNCTION leasedjob.record_ticks(
    p_cluster text, p_code text, p_through timestamptz, p_ranges jsonb, p_version bigint,
    OUT recorded boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();
    recorded := false;
    SELECT c.watermark INTO record_ticks.watermark
      FROM job_code c
     WHERE c.code = p_code
       AND EXISTS (SELECT FROM job_registration g WHERE g.code = c.code AND g.cluster = p_cluster)
       FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        SELECT c.watermark INTO record_ticks.watermark FROM job_code c WHERE c.code = p_code;
        RETURN;
    END IF;
    -- What was counted from schedules that are not those of the code any more is to be counted again.
    IF p_version <> (SELECT c.schedules_version FROM job_code c WHERE c.code = p_code) THEN
        RETURN;
    END IF;
    -- A range that ends in the future can't be judged yet; one with the watermark inside was computed too early.
    IF p_through > clock_timestamp() OR ranges_are_stale(record_ticks.watermark, p_ranges) THEN
        RETURN;
    END IF;
    PERFORM write_ledger(p_cluster, p_code, record_ticks.watermark, p_ranges);
    IF p_through > record_ticks.watermark THEN
        UPDATE job_code c SET watermark = p_through WHERE c.code = p_code;
        record_ticks.watermark := p_through;
    END IF;
    recorded := true;
END $$;

-- As operators of the previous version ask.
CREATE OR REPLACE FUNCTION leasedjob.record_ticks(
    p_cluster text, p_code text, p_through timestamptz, p_ranges jsonb, OUT recorded boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    SELECT r.recorded, r.watermark INTO record_ticks.recorded, record_ticks.watermark
      FROM record_ticks(p_cluster, p_code, p_through, p_ranges, NULL) r;
END $$;

CREATE FUNCTION leasedjob.record_suspended(
    p_cluster text, p_code text, p_through timestamptz, p_ranges jsonb, p_version bigint,
    OUT recorded boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();
    PERFORM FROM job_code c WHERE c.code = p_code FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND AND NOT EXISTS (SELECT FROM job_registration g
                              WHERE g.code = p_code AND g.cluster <> p_cluster AND NOT g.suspended) THEN
        SELECT r.recorded, r.watermark INTO record_suspended.recorded, record_suspended.watermark
          FROM record_ticks(p_cluster, p_code, p_through, p_ranges, p_version) r;
        RETURN;
    END IF;
    recorded := false;
    SELECT c.watermark INTO record_suspended.watermark FROM job_code c WHERE c.code = p_code;
END $$;

CREATE OR REPLACE FUNCTION leasedjob.record_suspended(
    p_cluster text, p_code text, p_through timestamptz, p_ranges jsonb, OUT recorded boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    SELECT r.recorded, r.watermark INTO record_suspended.recorded, record_suspended.watermark
      FROM record_suspended(p_cluster, p_code, p_through, p_ranges, NULL) r;
END $$;

CREATE FUNCTION leasedjob.resume_code(
    p_code text, p_at timestamptz, p_ranges jsonb, p_version bigint, p_audit jsonb,
    OUT busy boolean, OUT resumed boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_code job_code;
BEGIN
    PERFORM require_read_committed();
    resumed := false;
    SELECT * INTO v_code FROM job_code c WHERE c.code = p_code FOR NO KEY UPDATE SKIP LOCKED;
    busy := NOT FOUND;
    IF busy OR v_code.suspended_at IS NULL THEN
        watermark := v_code.watermark;
        RETURN;
    END IF;
    -- Ranges may have been computed from an older watermark, or from other schedules: then to be asked again.
    IF p_version <> v_code.schedules_version
       OR p_at > clock_timestamp() OR ranges_are_stale(v_code.watermark, p_ranges) THEN
        busy := true;
        RETURN;
    END IF;
    PERFORM write_ledger(p_audit ->> 'cluster', p_code, v_code.watermark, p_ranges);
    watermark := greatest(v_code.watermark, p_at);
    UPDATE job_code c
       SET watermark = resume_code.watermark, suspended_at = NULL, resumed_at = clock_timestamp(),
           suspension_changed_at = clock_timestamp()
     WHERE c.code = p_code;
    resumed := true;
    PERFORM write_audit(p_code, NULL, NULL, 'Resumed', p_audit);
END $$;

CREATE OR REPLACE FUNCTION leasedjob.resume_code(
    p_code text, p_at timestamptz, p_ranges jsonb, p_audit jsonb,
    OUT busy boolean, OUT resumed boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    SELECT r.busy, r.resumed, r.watermark INTO resume_code.busy, resume_code.resumed, resume_code.watermark
      FROM resume_code(p_code, p_at, p_ranges, NULL, p_audit) r;
END $$;

CREATE OR REPLACE FUNCTION leasedjob.prune_ledger(p_before timestamptz, p_limit integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_gone bigint;
    v_more bigint;
BEGIN
    PERFORM require_read_committed();
    WITH due AS MATERIALIZED (
        SELECT l.code, l.first, l.kind, l.last
          FROM tick_ledger l JOIN job_code c ON c.code = l.code AND l.last <= c.watermark
         WHERE l.last < p_before
         ORDER BY l.last LIMIT p_limit
    ), locked AS MATERIALIZED (
        SELECT c.code FROM job_code c WHERE c.code IN (SELECT d.code FROM due d)
         ORDER BY c.code FOR NO KEY UPDATE SKIP LOCKED
    ), gone AS (
        -- A range may have grown since it was looked at.
        DELETE FROM tick_ledger l USING due d, locked k
         WHERE k.code = d.code AND l.code = d.code AND l.first = d.first AND l.kind = d.kind AND l.last = d.last
        RETURNING l.code, l.last
    ), told AS (
        UPDATE job_code c SET ledger_through = greatest(c.ledger_through, g.last)
          FROM (SELECT gone.code, max(gone.last) AS last FROM gone GROUP BY gone.code) g
         WHERE c.code = g.code
    )
    SELECT count(*) INTO v_gone FROM gone;
    DELETE FROM audit a WHERE a.id IN (SELECT o.id FROM audit o WHERE o.at < p_before ORDER BY o.id LIMIT p_limit);
    GET DIAGNOSTICS v_more = ROW_COUNT;
    v_gone := v_gone + v_more;
    DELETE FROM backfill b
     WHERE b.uid IN (SELECT o.uid FROM backfill o WHERE o.changed_at < p_before LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_more = ROW_COUNT;
    v_gone := v_gone + v_more;
    -- Which schedule was in force when, as long as a range may need it.
    DELETE FROM code_schedule s
     WHERE s.id IN (SELECT o.id FROM code_schedule o LEFT JOIN job_code c ON c.code = o.code
                     WHERE o.until < p_before AND o.until <= coalesce(c.watermark, 'infinity')
                     LIMIT p_limit FOR UPDATE OF o SKIP LOCKED);
    GET DIAGNOSTICS v_more = ROW_COUNT;
    RETURN v_gone + v_more;
END $$;

REVOKE ALL ON leasedjob.code_schedule FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA leasedjob FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA leasedjob FROM PUBLIC;
