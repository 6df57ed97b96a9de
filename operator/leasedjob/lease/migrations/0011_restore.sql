-- The database was restored to an earlier point: what it gave out and recorded after that point is not known any more. After
-- `leasedjob restored` nothing of it is given out, or done, a second time.
--
--   * Fencing tokens and attempts go on above what may have been given out.
--   * Nobody holds a lease any more. A run that was under way gets no further attempt; how it ended is still recorded from
--     its Pod, where that can be seen.
--   * No run begins before whoever held a lease has stopped.
--   * Ticks up to the restore are decided: they are in the ledger, and run if somebody asks for them.

CREATE TABLE leasedjob.restore (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    as_of      timestamptz NOT NULL,
    begins_at  timestamptz NOT NULL,
    token_from bigint NOT NULL,
    token_to   bigint NOT NULL,
    runs       bigint NOT NULL,
    codes      bigint NOT NULL
);
COMMENT ON TABLE leasedjob.restore IS 'When this database was restored to an earlier point.';
COMMENT ON COLUMN leasedjob.restore.as_of IS 'Up to when the database that is lost may have given something out.';
COMMENT ON COLUMN leasedjob.restore.begins_at IS 'Before this no run begins: until then a lease of before may be trusted.';
REVOKE ALL ON leasedjob.restore FROM PUBLIC;

ALTER TABLE leasedjob.job_scheduler ADD COLUMN attempt_gap integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN leasedjob.job_scheduler.attempt_gap IS
    'So many attempts may have been made that a restore has forgotten: the next one''s number is larger by this.';

-- A LeasedJob that was created after that point is as new to this database as one of today. Its ticks count from the
-- restore on.
CREATE FUNCTION leasedjob.count_from_restore() RETURNS trigger
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    NEW.watermark := greatest(NEW.watermark, (SELECT max(x.as_of) FROM leasedjob.restore x));
    RETURN NEW;
END $$;
CREATE TRIGGER job_code_after_restore BEFORE INSERT ON leasedjob.job_code
    FOR EACH ROW EXECUTE FUNCTION leasedjob.count_from_restore();

-- What is to be done about each request; as before, and: nothing begins while leases of before a restore may be trusted;
-- a run of type Initial that may have run before the restore is closed.
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

CREATE OR REPLACE FUNCTION leasedjob.take_runs(
    p_cluster text, p_requests leasedjob.claim_request[], p_locked jsonb, p_rows jsonb, p_waiting text[]
)
RETURNS TABLE (
    ordinal integer, verdict text, id uuid, owner_token uuid, attempt integer, fencing_token bigint,
    expires_at timestamptz, db_now timestamptz, watermark timestamptz, reason text, retry_at timestamptz, code text,
    halted boolean, replaced boolean
)
LANGUAGE plpgsql VOLATILE
SET search_path = leasedjob, pg_temp
-- Every statement here looks keys up, whatever their number: plans made for the parameters would cost more than they
-- save, and read whole tables while these are small.
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH decided AS MATERIALIZED (
        SELECT d.*, clock_timestamp() AS taken_at,
               CASE WHEN d.action IN ('insert', 'close') THEN gen_random_uuid()
                    WHEN d.action = 'reclaim' THEN d.id END AS new_id,
               CASE WHEN d.action IN ('insert', 'close', 'reclaim') THEN gen_random_uuid() END AS new_owner,
               CASE WHEN d.action IN ('insert', 'close', 'reclaim')
                    THEN nextval('leasedjob.fencing_token') END AS new_token
          FROM decide_claims(p_cluster, p_requests, p_locked, p_rows, p_waiting) d
    ), fresh AS (
        INSERT INTO job_scheduler AS s (
               id, owner_token, fencing_token, lock_key, type, code, run_key, name, backoff_limit,
               interruption_limit, lease_ms, run_lease_ms, cluster, namespace, job_name, job_uid, tenant, tick,
               manual, modified_at, status, reason, finished_at)
        SELECT d.new_id, d.new_owner, d.new_token, d.lock_key, d.type, d.code, d.run_key, d.name,
               d.backoff_limit, d.interruption_limit, d.lease_ms, d.run_lease_ms, p_cluster, d.namespace,
               d.job_name, d.job_uid, d.tenant, d.tick, d.manual, d.taken_at,
               CASE d.action WHEN 'close' THEN 'FAIL' ELSE 'RUNNING' END::job_scheduler_status,
               CASE d.action WHEN 'close' THEN d.reason ELSE '' END,
               CASE d.action WHEN 'close' THEN d.taken_at END
          FROM decided d
         WHERE d.action IN ('insert', 'close')
         ORDER BY d.code  -- whose locks we hold; two of the indexes are in this order
            ON CONFLICT (lock_key) DO NOTHING
        RETURNING s.lock_key
    ), reclaimed AS (
        UPDATE job_scheduler s
           SET status = 'RUNNING', outcome = NULL, owner_token = d.new_owner, attempt = d.attempt + 1, attempt_gap = 0,
               fencing_token = d.new_token,
               interruptions = s.interruptions
                             + CASE WHEN s.status = 'RUNNING' AND s.pod_uid IS NOT NULL THEN 1 ELSE 0 END,
               name = d.name, backoff_limit = d.backoff_limit, interruption_limit = d.interruption_limit,
               lease_ms = d.lease_ms, run_lease_ms = d.run_lease_ms, cluster = p_cluster,
               namespace = d.namespace, job_name = d.job_name, job_uid = d.job_uid, tenant = d.tenant,
               manual = d.manual, holder = '', pod_name = NULL, pod_uid = NULL, adopted_at = NULL,
               finished_at = NULL, stop_requested_at = NULL, stop_reason = '', retry_at = NULL, reason = '',
               data = NULL, started_at = d.taken_at, modified_at = d.taken_at, changed_at = clock_timestamp()
          FROM decided d
         -- The row is ours since it was locked; nobody else can have changed it.
         WHERE d.action = 'reclaim' AND s.id = d.id AND s.attempt + s.attempt_gap = d.attempt
        RETURNING s.lock_key
    ), answered AS MATERIALIZED (
        SELECT v.*, v.verdict = 'claimed' AS claimed,
               (NOT v.manual AND v.tick > v.watermark
                AND v.verdict IN ('claimed', 'missed', 'overlap_skipped')) IS TRUE AS moves
          FROM (SELECT d.*,
                       CASE WHEN d.action IN ('insert', 'reclaim') THEN CASE
                                WHEN d.lock_key IN (SELECT f.lock_key FROM fresh f UNION ALL
                                                    SELECT f.lock_key FROM reclaimed f) THEN 'claimed'
                                ELSE 'busy' END
                            WHEN d.action IN ('end', 'close') THEN 'exhausted'
                            WHEN d.action = 'replace' THEN 'overlap_wait'
                            ELSE d.action END AS verdict
                  FROM decided d
                OFFSET 0) v
    ), moved AS (
        UPDATE job_code c SET watermark = a.tick FROM answered a WHERE a.moves AND c.code = a.code
    )
    SELECT done.ordinal, done.verdict,
           CASE WHEN done.claimed OR done.action = 'close' THEN done.new_id ELSE done.id END,
           CASE WHEN done.claimed THEN done.new_owner END,
           CASE WHEN done.claimed THEN coalesce(done.attempt, 0) + 1 ELSE done.attempt END,
           CASE WHEN done.claimed THEN done.new_token ELSE done.fencing_token END,
           CASE WHEN done.claimed THEN expires_at(done.taken_at, done.lease_ms) ELSE done.expires_at END,
           clock_timestamp(),
           CASE WHEN done.moves THEN done.tick ELSE done.watermark END,
           CASE WHEN done.claimed THEN '' ELSE done.reason END,
           CASE WHEN NOT done.claimed THEN done.retry_at END,
           done.code,
           NOT done.manual AND done.id IS NULL AND done.verdict IN ('overlap_wait', 'future', 'busy'),
           done.action = 'replace'
      FROM (SELECT a.*,
                   -- Whatever moves the watermark writes down what it passes.
                   CASE WHEN a.moves AND (a.verdict <> 'claimed' OR a.dropped <> '[]')
                        THEN write_ledger(p_cluster, a.code, a.watermark, coalesce(a.dropped, '[]') || CASE a.verdict
                                 WHEN 'claimed' THEN '[]'::jsonb
                                 ELSE jsonb_build_array(jsonb_build_object(
                                     'first', a.tick, 'last', a.tick, 'count', 1, 'exact', true,
                                     'kind', CASE a.verdict WHEN 'missed' THEN 'missed' ELSE 'skipped' END,
                                     'reason', CASE a.verdict WHEN 'missed' THEN 'StartingDeadline'
                                                              ELSE 'Overlap' END)) END) END,
                   -- An expired attempt that has no successor: the last interruption is the final one.
                   CASE WHEN a.action = 'end' THEN close_attempt(a.id, 'release', false, NULL, a.reason, NULL) END
              FROM answered a) done;
END $$;

CREATE OR REPLACE FUNCTION leasedjob.acquire(
    p_lock_key text, p_type leasedjob.job_scheduler_type, p_code text, p_run_key text, p_name text, p_lease_ms bigint,
    p_token uuid, p_holder text, OUT verdict text, OUT job leasedjob.job_scheduler
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    IF EXISTS (SELECT FROM restore x WHERE x.begins_at > clock_timestamp()) THEN
        verdict := 'held';  -- perhaps by somebody whom this database doesn't know any more
        RETURN;
    END IF;

    INSERT INTO job_scheduler AS s (lock_key, type, code, run_key, name, lease_ms, run_lease_ms, owner_token, holder)
    VALUES (p_lock_key, p_type, p_code, p_run_key, p_name, p_lease_ms, p_lease_ms, p_token, p_holder)
        ON CONFLICT (lock_key) DO NOTHING
    RETURNING s.* INTO job;
    IF FOUND THEN
        verdict := 'acquired';
        RETURN;
    END IF;

    IF is_pruned(p_code, p_run_key)
       AND NOT EXISTS (SELECT FROM job_scheduler s WHERE s.lock_key = p_lock_key AND s.status <> 'FAIL') THEN
        verdict := 'pruned';
        RETURN;
    END IF;

    -- FAIL, or RUNNING and expired by the duration that its holder recorded; or this call's own row, where the answer
    -- to its first try was lost. A row that is locked elsewhere is left alone: somebody is at it.
    PERFORM FROM job_scheduler s
      WHERE s.lock_key = p_lock_key AND s.status <> 'SUCCESS'
        AND (s.status = 'FAIL' OR s.owner_token = p_token OR is_expired(s.modified_at, s.lease_ms))
        FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        UPDATE job_scheduler s SET modified_at = clock_timestamp()
         WHERE s.lock_key = p_lock_key AND s.status = 'RUNNING' AND s.owner_token = p_token
           AND NOT is_expired(s.modified_at, s.lease_ms)
        RETURNING s.* INTO job;
        IF FOUND THEN
            verdict := 'acquired';
            RETURN;
        END IF;
        UPDATE job_scheduler s
           SET status = 'RUNNING', outcome = NULL, owner_token = p_token, attempt = s.attempt + s.attempt_gap + 1, attempt_gap = 0,
               fencing_token = nextval('leasedjob.fencing_token'), name = p_name, lease_ms = p_lease_ms,
               run_lease_ms = p_lease_ms, holder = p_holder, cluster = '', namespace = '', job_name = '', job_uid = '',
               tenant = '', pod_name = NULL, pod_uid = NULL, adopted_at = NULL, finished_at = NULL,
               stop_requested_at = NULL, stop_reason = '', retry_at = NULL, reason = '', data = NULL,
               started_at = clock_timestamp(), modified_at = clock_timestamp(), changed_at = clock_timestamp()
         WHERE s.lock_key = p_lock_key
           AND (s.status = 'FAIL' OR (s.status = 'RUNNING' AND is_expired(s.modified_at, s.lease_ms)))
        RETURNING s.* INTO job;
        IF FOUND THEN
            verdict := 'acquired';
            RETURN;
        END IF;
    END IF;

    SELECT s.* INTO job FROM job_scheduler s WHERE s.lock_key = p_lock_key;
    verdict := CASE WHEN job.status = 'SUCCESS' THEN 'completed' ELSE 'held' END;
END $$;

-- A copy of a database alone has no roles, and perhaps not all of its rights: what PUBLIC never had is taken from it, and
-- roles that this server lacks speak for nobody, so that the operator makes new ones. Which they are.
CREATE FUNCTION leasedjob.after_move() RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_gone text[];
BEGIN
    PERFORM require_read_committed();
    WITH gone AS (
        DELETE FROM tenant_role t WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = t.role)
        RETURNING t.role::text)
    SELECT coalesce(array_agg(g.role ORDER BY g.role), '{}') INTO v_gone FROM gone g;
    REVOKE ALL ON ALL FUNCTIONS IN SCHEMA leasedjob FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA leasedjob FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA leasedjob FROM PUBLIC;
    RETURN v_gone;
END $$;

-- Whoever restored the database says so. p_dry_run: change nothing, say what would be done.
CREATE FUNCTION leasedjob.after_restore(
    p_as_of timestamptz, p_longest_ms bigint, p_tokens bigint, p_token_above bigint, p_attempts integer, p_dry_run boolean
)
RETURNS TABLE (
    as_of timestamptz, begins_at timestamptz, token_from bigint, token_to bigint, running bigint, claims bigint,
    waiting bigint, library bigint, codes bigint, backfills bigint, roles text[]
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz;
    v_newest timestamptz;
BEGIN
    PERFORM require_read_committed();
    LOCK TABLE job_code, job_scheduler IN SHARE ROW EXCLUSIVE MODE;
    v_now := clock_timestamp();
    after_restore.as_of := coalesce(p_as_of, v_now);
    IF after_restore.as_of > v_now THEN
        RAISE EXCEPTION 'as-of lies in the future: by the database''s clock it is %', v_now
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_newest := greatest((SELECT max(s.changed_at) FROM job_scheduler s), (SELECT max(c.watermark) FROM job_code c));
    IF after_restore.as_of < v_newest THEN
        RAISE EXCEPTION 'as-of is too early: the database has records of %', v_newest
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    SELECT count(*) FILTER (WHERE s.job_uid <> '' AND s.status = 'RUNNING' AND s.pod_uid IS NOT NULL),
           count(*) FILTER (WHERE s.job_uid <> '' AND s.status = 'RUNNING' AND s.pod_uid IS NULL),
           count(*) FILTER (WHERE s.job_uid <> '' AND s.retry_at IS NOT NULL),
           count(*) FILTER (WHERE s.job_uid = '' AND s.status = 'RUNNING'),
           -- Whoever holds a lease that this database does not know has heard of it last before as_of.
           greatest(after_restore.as_of + greatest(p_longest_ms, max(s.lease_ms), max(s.run_lease_ms))
                                          * interval '1 millisecond',
                    max(expires_at(s.modified_at, s.lease_ms)) FILTER (WHERE s.status = 'RUNNING'))
      INTO running, claims, waiting, library, begins_at
      FROM job_scheduler s;
    SELECT greatest(t.last_value, (SELECT max(s.fencing_token) FROM job_scheduler s)) INTO token_from FROM fencing_token t;
    token_to := greatest(token_from + p_tokens, p_token_above);
    codes := (SELECT count(*) FROM job_code c WHERE c.watermark < after_restore.as_of);
    backfills := (SELECT count(*) FROM backfill b WHERE b.through < after_restore.as_of
                     AND EXISTS (SELECT FROM job_code c WHERE c.code = b.code));
    roles := ARRAY(SELECT t.role::text FROM tenant_role t
                    WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = t.role) ORDER BY t.role);
    IF p_dry_run THEN
        RETURN NEXT;
        RETURN;
    END IF;

    PERFORM setval('fencing_token', token_to);
    INSERT INTO restore (as_of, begins_at, token_from, token_to, runs, codes)
    VALUES (after_restore.as_of, after_restore.begins_at, after_restore.token_from, after_restore.token_to,
            running + claims + waiting + library, after_restore.codes);

    -- Adopted ones stay RUNNING until their lease has run out: an operator that sees their Pod can still say how it ended.
    PERFORM stop_runs(ARRAY(SELECT s.id FROM job_scheduler s
                             WHERE s.job_uid <> '' AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)),
                      'Restored: the database was restored to an earlier point; nobody knows how far this run came');
    UPDATE job_scheduler s SET owner_token = gen_random_uuid(), changed_at = clock_timestamp() WHERE s.status = 'RUNNING';
    PERFORM close_attempt(s.id, 'release', false, NULL, 'Restored', NULL)
       FROM job_scheduler s WHERE s.job_uid = '' AND s.status = 'RUNNING';
    UPDATE job_scheduler s SET attempt_gap = s.attempt_gap + p_attempts WHERE s.status <> 'SUCCESS';

    -- Whoever asks the library for a tick by its name gets it only if it is a later one.
    INSERT INTO pruned_through AS p (code, through)
    SELECT DISTINCT s.code, after_restore.as_of FROM job_scheduler s
     WHERE s.job_uid = '' AND tick_of(s.run_key) IS NOT NULL
       AND NOT EXISTS (SELECT FROM job_code c WHERE c.code = s.code)
        ON CONFLICT (code) DO UPDATE SET through = greatest(p.through, excluded.through), moved_at = clock_timestamp();

    -- How many ticks there are is not known here: at least one stands for "some".
    INSERT INTO tick_ledger (code, first, last, count, exact, kind, reason, decided_by)
    SELECT c.code, c.watermark + interval '1 microsecond', after_restore.as_of, 1, false, 'missed', 'Restored', 'restore'
      FROM job_code c WHERE c.watermark < after_restore.as_of
        ON CONFLICT DO NOTHING;
    UPDATE job_code c SET watermark = after_restore.as_of WHERE c.watermark < after_restore.as_of;
    UPDATE backfill b SET through = after_restore.as_of, changed_at = clock_timestamp()
     WHERE b.through < after_restore.as_of;
    DELETE FROM run_transition;  -- news of before has been told

    PERFORM after_move();
    RETURN NEXT;
END $$;
COMMENT ON FUNCTION leasedjob.after_restore IS
    'p_as_of: default now. p_longest_ms: the longest lease there may be. p_tokens, p_attempts: how far numbers jump.';

REVOKE ALL ON FUNCTION leasedjob.after_restore, leasedjob.after_move, leasedjob.count_from_restore FROM PUBLIC;
