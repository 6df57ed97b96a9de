-- The ledger of ticks that did not run: ranges that grow, counts, and how long they are kept. A schedule that is suspended
-- after failures, in all clusters at once. Backfills. What a person may do to a run, and the line that it leaves.

-- -------------------------------------------------------------------------------------------------------------------
-- The ledger
-- -------------------------------------------------------------------------------------------------------------------

ALTER TABLE leasedjob.tick_ledger DROP CONSTRAINT tick_ledger_kind_check;
ALTER TABLE leasedjob.tick_ledger
    ADD CONSTRAINT tick_ledger_kind_check CHECK (kind IN ('skipped', 'missed', 'dropped'));
CREATE INDEX tick_ledger_decided ON leasedjob.tick_ledger (decided_at);
COMMENT ON COLUMN leasedjob.tick_ledger.kind IS
    'skipped: left out by policy; missed: nobody could start them in time; dropped: an edit of the schedule left them behind.';
COMMENT ON COLUMN leasedjob.tick_ledger.decided_by IS 'The clusters whose operators decided, of a range that grew.';

CREATE TABLE leasedjob.tick_count (
    code  text NOT NULL,
    kind  text NOT NULL,
    count bigint NOT NULL,
    PRIMARY KEY (code, kind)
) WITH (fillfactor = 70);
COMMENT ON TABLE leasedjob.tick_count IS 'How many ticks of a code did not run, ever: ranges are deleted some time, counts are not.';
INSERT INTO leasedjob.tick_count (code, kind, count)
SELECT code, kind, sum(count) FROM leasedjob.tick_ledger GROUP BY code, kind;

ALTER TABLE leasedjob.job_code
    ADD COLUMN ledger_through    timestamptz,
    ADD COLUMN suspended_at      timestamptz,
    ADD COLUMN suspended_by      text NOT NULL DEFAULT '',
    ADD COLUMN suspended_runs    integer NOT NULL DEFAULT 0,
    ADD COLUMN suspended_reason  text NOT NULL DEFAULT '',
    ADD COLUMN resumed_at        timestamptz,
    ADD COLUMN suspension_changed_at timestamptz;
CREATE INDEX job_code_suspension ON leasedjob.job_code (suspension_changed_at) WHERE suspension_changed_at IS NOT NULL;
COMMENT ON COLUMN leasedjob.job_code.ledger_through IS 'Up to which tick ranges of the ledger were deleted.';
COMMENT ON COLUMN leasedjob.job_code.suspended_at IS
    'Set while the schedule is suspended after failures: no tick is claimed, in any cluster.';
COMMENT ON COLUMN leasedjob.job_code.resumed_at IS 'Runs that began before don''t count as failures in a row.';

-- Writes tick ranges that the watermark is about to pass. Ranges at or before it were decided by somebody else. A range
-- that goes on where the latest one of the ledger ends, for the same reason, is that one grown longer: between the two
-- nothing was decided, for the watermark, or the range that was just written, stands where that one ends.
CREATE OR REPLACE FUNCTION leasedjob.write_ledger(
    p_cluster text, p_code text, p_watermark timestamptz, p_ranges jsonb
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_range  record;
    v_latest tick_ledger;
    v_end    timestamptz := p_watermark;
BEGIN
    FOR v_range IN
        SELECT x.first, x.last, x.count, coalesce(x.exact, true) AS exact, x.kind, x.reason
          FROM jsonb_to_recordset(p_ranges)
               AS x (first timestamptz, last timestamptz, count bigint, exact boolean, kind text, reason text)
         WHERE x.first > p_watermark
         ORDER BY x.first
    LOOP
        SELECT * INTO v_latest FROM tick_ledger l WHERE l.code = p_code ORDER BY l.first DESC, l.kind DESC LIMIT 1;
        IF FOUND AND v_latest.last = v_end AND v_latest.kind = v_range.kind AND v_latest.reason = v_range.reason THEN
            UPDATE tick_ledger l
               SET last = v_range.last, count = l.count + v_range.count, exact = l.exact AND v_range.exact,
                   decided_by = CASE WHEN p_cluster = ANY (string_to_array(l.decided_by, ', ')) THEN l.decided_by
                                     ELSE l.decided_by || ', ' || p_cluster END,
                   decided_at = clock_timestamp()
             WHERE l.code = p_code AND l.first = v_latest.first AND l.kind = v_latest.kind;
        ELSE
            INSERT INTO tick_ledger (code, first, last, count, exact, kind, reason, decided_by)
            VALUES (p_code, v_range.first, v_range.last, v_range.count, v_range.exact, v_range.kind, v_range.reason,
                    p_cluster)
                ON CONFLICT DO NOTHING;
        END IF;
        INSERT INTO tick_count AS c (code, kind, count) VALUES (p_code, v_range.kind, v_range.count)
            ON CONFLICT (code, kind) DO UPDATE SET count = c.count + excluded.count;
        v_end := v_range.last;
    END LOOP;
END $$;

-- As record_ticks, for ticks of a suspended object: nothing where another cluster is active with the code, for there they
-- are due.
CREATE FUNCTION leasedjob.record_suspended(
    p_cluster text, p_code text, p_through timestamptz, p_ranges jsonb, OUT recorded boolean, OUT watermark timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();
    PERFORM FROM job_code c WHERE c.code = p_code FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND AND NOT EXISTS (SELECT FROM job_registration g
                              WHERE g.code = p_code AND g.cluster <> p_cluster AND NOT g.suspended) THEN
        SELECT r.recorded, r.watermark INTO record_suspended.recorded, record_suspended.watermark
          FROM record_ticks(p_cluster, p_code, p_through, p_ranges) r;
        RETURN;
    END IF;
    recorded := false;
    SELECT c.watermark INTO record_suspended.watermark FROM job_code c WHERE c.code = p_code;
END $$;

-- Deletes ranges that end before an instant, some at a time; none that the watermark has not passed. Also old audit lines,
-- and backfills that nobody has looked at since. How many rows went.
CREATE FUNCTION leasedjob.prune_ledger(p_before timestamptz, p_limit integer) RETURNS bigint
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
    RETURN v_gone + v_more;
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- Registration, which writes down what it passes
-- -------------------------------------------------------------------------------------------------------------------

-- `passed_at`: up to which instant the ticks after the watermark are in `passed`, ranges as of write_ledger. They are the
-- ticks that an edit of the schedule or a resume leaves behind. Operators of the previous version say nothing of them.
ALTER TYPE leasedjob.job_to_register ADD ATTRIBUTE passed_at timestamptz, ADD ATTRIBUTE passed jsonb;

CREATE OR REPLACE FUNCTION leasedjob.register_jobs(p_cluster text, p_jobs jsonb)
RETURNS TABLE (code text, busy boolean, watermark timestamptz, spec_differs boolean)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_jobs   job_to_register[];
    v_locked text[];
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
    -- What was computed from an older watermark, or by a clock that is ahead, is not the truth: to be asked again.
    v_locked := ARRAY(
        SELECT l.code
          FROM unnest(v_locked) l (code) JOIN unnest(v_jobs) j ON j.code = l.code JOIN job_code c ON c.code = l.code
         WHERE j.passed IS NULL
            OR (j.passed_at <= clock_timestamp() AND NOT ranges_are_stale(c.watermark, j.passed))
         ORDER BY l.code);

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

    -- From when ticks count. Where another cluster is active with the code, its view stands: moving the watermark
    -- could drop a tick that it is about to claim.
    WITH moved AS MATERIALIZED (
        SELECT j.code, c.watermark AS before, j.passed,
               greatest(
                   CASE WHEN NOT other.active AND g.uid IS DISTINCT FROM j.uid
                        THEN least(j.created_at, clock_timestamp()) END,
                   CASE WHEN NOT other.active AND g.suspended AND NOT j.suspended
                        THEN coalesce(j.passed_at, clock_timestamp()) END,
                   CASE WHEN g.schedule_hash <> j.schedule_hash AND NOT other.same_schedule
                        THEN coalesce(j.passed_at, clock_timestamp()) END) AS after,
               g.uid = j.uid AS same
          FROM unnest(v_jobs) j
          JOIN unnest(v_locked) l (code) ON l.code = j.code
          JOIN job_code c ON c.code = j.code
          LEFT JOIN job_registration g ON g.code = j.code AND g.cluster = p_cluster
         CROSS JOIN LATERAL (
               SELECT count(*) > 0 AS active,
                      coalesce(bool_or(o.schedule_hash = j.schedule_hash), false) AS same_schedule
                 FROM job_registration o
                WHERE o.code = j.code AND o.cluster <> p_cluster AND NOT o.suspended) other
    ), written AS MATERIALIZED (
        SELECT m.code, write_ledger(p_cluster, m.code, m.before, m.passed)
          FROM moved m WHERE m.same AND m.passed IS NOT NULL AND m.passed <> '[]' AND m.after > m.before
    )
    UPDATE job_code c SET watermark = m.after
      FROM moved m LEFT JOIN written w ON w.code = m.code
     WHERE c.code = m.code AND m.after > c.watermark;

    INSERT INTO job_registration AS g (code, cluster, namespace, name, uid, created_at, schedule_hash, spec_hash,
                                       policy, suspended)
    SELECT j.code, p_cluster, j.namespace, j.name, j.uid, j.created_at, j.schedule_hash, j.spec_hash, j.policy,
           j.suspended
      FROM unnest(v_jobs) j JOIN unnest(v_locked) l (code) ON l.code = j.code
     ORDER BY j.code
        ON CONFLICT (code, cluster) DO UPDATE
       SET namespace = excluded.namespace, name = excluded.name, uid = excluded.uid,
           created_at = excluded.created_at, schedule_hash = excluded.schedule_hash,
           spec_hash = excluded.spec_hash, policy = excluded.policy, suspended = excluded.suspended,
           seen_at = clock_timestamp();

    RETURN QUERY
    SELECT j.code, l.code IS NULL, CASE WHEN l.code IS NOT NULL THEN c.watermark END,
           EXISTS (SELECT FROM job_registration o
                    WHERE o.code = j.code AND o.cluster <> p_cluster
                      AND (o.spec_hash <> j.spec_hash OR o.schedule_hash <> j.schedule_hash OR o.policy <> j.policy))
      FROM unnest(v_jobs) j
      LEFT JOIN unnest(v_locked) l (code) ON l.code = j.code
      LEFT JOIN job_code c ON c.code = j.code;
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- Suspended after failures
-- -------------------------------------------------------------------------------------------------------------------

-- What is to be done about each request; as before, and: where the schedule is suspended after failures its ticks wait.
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
       s.id, s.attempt, s.fencing_token,
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
            ELSE coalesce(s.reason, '') END,
       s.retry_at
  FROM unnest(p_requests) r
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
       WHEN others.running > 0 THEN 'overlap_wait'
       ELSE 'reclaim' END AS action) decided;
END;

-- Suspends the schedule if its last p_limit runs have failed. `suspended`: by this call. What was cancelled, replaced or
-- deleted has not failed, and what a person asked for says nothing of the schedule.
CREATE FUNCTION leasedjob.suspend_failing(
    p_cluster text, p_code text, p_limit integer, OUT busy boolean, OUT suspended boolean
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_code   job_code;
    v_reason text;
BEGIN
    PERFORM require_read_committed();
    suspended := false;
    SELECT * INTO v_code FROM job_code c WHERE c.code = p_code FOR NO KEY UPDATE SKIP LOCKED;
    busy := NOT FOUND;
    IF busy OR v_code.suspended_at IS NOT NULL THEN
        RETURN;
    END IF;
    SELECT coalesce(count(*) = p_limit AND bool_and(l.failed), false),
           (array_agg(l.run_key || ': ' || l.reason ORDER BY l.created_at DESC))[1]
      INTO suspended, v_reason
      FROM (SELECT s.run_key, s.reason, s.created_at, s.status = 'FAIL' AS failed
              FROM job_scheduler s
             WHERE s.code = p_code AND s.type = 'SCHEDULE' AND s.tick IS NOT NULL AND NOT s.manual
               AND (s.status = 'SUCCESS' OR (s.status = 'FAIL' AND s.retry_at IS NULL
                    AND split_part(s.reason, ':', 1) NOT IN ('Cancelled', 'Replaced', 'JobDeleted')))
               AND s.created_at > coalesce(v_code.resumed_at, '-infinity')
             ORDER BY s.created_at DESC LIMIT p_limit) l;
    IF suspended THEN
        UPDATE job_code c
           SET suspended_at = clock_timestamp(), suspended_by = p_cluster, suspended_runs = p_limit,
               suspended_reason = left(coalesce(v_reason, ''), 512), suspension_changed_at = clock_timestamp()
         WHERE c.code = p_code;
    END IF;
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- What a person does to runs
-- -------------------------------------------------------------------------------------------------------------------

CREATE TABLE leasedjob.audit (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    cluster  text NOT NULL,
    code     text NOT NULL,
    run_key  text,
    attempt  integer,
    action   text NOT NULL,
    did      text NOT NULL,
    asked_by text NOT NULL,
    request  text NOT NULL,
    why      text NOT NULL DEFAULT '',
    CONSTRAINT audit_once UNIQUE (request, did)
);
COMMENT ON TABLE leasedjob.audit IS 'What somebody asked to be done to runs, and was done.';
COMMENT ON COLUMN leasedjob.audit.asked_by IS 'The object that asked, as namespace/name.';
COMMENT ON COLUMN leasedjob.audit.request IS 'Its uid.';

-- p_audit: {cluster, action, asked_by, request, why}. Several replicas carry one request out: its line is written once.
CREATE FUNCTION leasedjob.write_audit(p_code text, p_run_key text, p_attempt integer, p_did text, p_audit jsonb)
RETURNS void
LANGUAGE sql VOLATILE SET search_path = leasedjob, pg_temp AS $$
    INSERT INTO audit (cluster, code, run_key, attempt, action, did, asked_by, request, why)
    SELECT a.cluster, p_code, p_run_key, p_attempt, a.action, p_did, a.asked_by, a.request, coalesce(a.why, '')
      FROM jsonb_to_record(p_audit) AS a (cluster text, action text, asked_by text, request text, why text)
        ON CONFLICT DO NOTHING
$$;

-- Ends a suspension after failures. Ticks up to p_at are in p_ranges, and none of them is replayed.
CREATE FUNCTION leasedjob.resume_code(
    p_code text, p_at timestamptz, p_ranges jsonb, p_audit jsonb,
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
    -- Ranges may have been computed from an older watermark: then to be asked again.
    IF p_at > clock_timestamp() OR ranges_are_stale(v_code.watermark, p_ranges) THEN
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

-- Ends runs for good, as request_stop, and says who wanted it.
CREATE FUNCTION leasedjob.cancel_run(p_id uuid, p_reason text, p_audit jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    IF p_id <> ALL (stop_runs(ARRAY[p_id], p_reason)) THEN
        RETURN false;
    END IF;
    PERFORM write_audit(s.code, s.run_key, s.attempt, 'Cancelled', p_audit) FROM job_scheduler s WHERE s.id = p_id;
    RETURN true;
END $$;

-- Takes the lease away from an attempt. `did`:
--   GivenBack  no Pod had adopted the claim: nothing runs, the next attempt may begin.
--   Fenced     no heartbeat extends the lease any more, and no report of the holder's own counts: the workload is stopped by
--              its node, and the next attempt may begin when the lease has run out.
--   Ended      with p_force: the lease has ended, the next attempt may begin. Whoever forced it has made sure that the
--              workload has stopped.
--   ''         the attempt isn't the present one, or not RUNNING.
-- Attempt and fencing token stay; the next attempt has larger ones.
CREATE FUNCTION leasedjob.release_run(p_id uuid, p_attempt integer, p_force boolean, p_audit jsonb) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_row job_scheduler;
    v_did text;
BEGIN
    PERFORM require_read_committed();
    SELECT * INTO v_row FROM job_scheduler s
     WHERE s.id = p_id AND s.attempt = p_attempt AND s.status = 'RUNNING'
       FOR NO KEY UPDATE NOWAIT;
    IF NOT FOUND THEN
        RETURN '';
    END IF;
    IF v_row.pod_uid IS NULL AND v_row.job_uid <> '' THEN
        v_did := 'GivenBack';
    ELSIF p_force THEN
        v_did := 'Ended';
    ELSE
        v_did := 'Fenced';
    END IF;
    IF v_did = 'Fenced' THEN
        UPDATE job_scheduler s SET owner_token = gen_random_uuid(), changed_at = clock_timestamp() WHERE s.id = p_id;
    ELSE
        PERFORM close_attempt(p_id, 'release', false, 0, 'Released', NULL);
    END IF;
    PERFORM write_audit(v_row.code, v_row.run_key, v_row.attempt, v_did, p_audit);
    RETURN v_did;
END $$;

-- Forgets that a run has failed: claimable at once, failures and interruptions counted from zero, attempt and fencing token
-- as they are. Nothing but a FAIL is changed. created_at moves with it: the run begins to count anew, for its deadlines and
-- for what was recent.
CREATE FUNCTION leasedjob.forget_run(p_id uuid, p_audit jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_row job_scheduler;
BEGIN
    PERFORM require_read_committed();
    SELECT * INTO v_row FROM job_scheduler s WHERE s.id = p_id AND s.status = 'FAIL' FOR NO KEY UPDATE NOWAIT;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE job_scheduler s
       SET failures = 0, interruptions = 0, retry_at = clock_timestamp(), stop_requested_at = NULL, stop_reason = '',
           reason = 'Forgotten', created_at = clock_timestamp(), changed_at = clock_timestamp()
     WHERE s.id = p_id;
    PERFORM write_audit(v_row.code, v_row.run_key, v_row.attempt, 'Forgotten', p_audit);
    RETURN true;
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- Backfills
-- -------------------------------------------------------------------------------------------------------------------

-- Its ticks are decided in order: `through` says up to where. A run that is active is in backfill_run; one that has ended is
-- in the counts.
CREATE TABLE leasedjob.backfill (
    uid        text PRIMARY KEY,
    cluster    text NOT NULL,
    code       text NOT NULL,
    through    timestamptz NOT NULL,
    ticks      bigint NOT NULL,
    planned    bigint NOT NULL,
    skipped    bigint NOT NULL DEFAULT 0,
    succeeded  bigint NOT NULL DEFAULT 0,
    failed     bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 70);
COMMENT ON TABLE leasedjob.backfill IS 'How far a backfill is; uid is that of the object that asks for it.';
CREATE TABLE leasedjob.backfill_run (
    uid    text NOT NULL REFERENCES leasedjob.backfill ON DELETE CASCADE,
    run_id uuid NOT NULL,
    tick   timestamptz NOT NULL,
    PRIMARY KEY (uid, run_id)
);
COMMENT ON TABLE leasedjob.backfill_run IS 'Runs that a backfill has started and that had not ended when it was last looked at.';

-- Counts what has ended. The caller holds the backfill's lock.
CREATE FUNCTION leasedjob.count_ended(p_uid text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    WITH ended AS (
        DELETE FROM backfill_run b USING job_scheduler s
         WHERE b.uid = p_uid AND s.id = b.run_id
           AND (s.status = 'SUCCESS' OR (s.status = 'FAIL' AND s.retry_at IS NULL))
        RETURNING s.status
    ), counted AS (
        SELECT count(*) AS n, count(*) FILTER (WHERE e.status = 'SUCCESS') AS good FROM ended e
    )
    UPDATE backfill b
       SET succeeded = b.succeeded + c.good, failed = b.failed + c.n - c.good, changed_at = clock_timestamp()
      FROM counted c WHERE b.uid = p_uid AND c.n > 0;
    -- A run whose row is gone has ended long ago, and nobody knows how.
    WITH lost AS (
        DELETE FROM backfill_run b
         WHERE b.uid = p_uid AND NOT EXISTS (SELECT FROM job_scheduler s WHERE s.id = b.run_id)
        RETURNING 1
    ), counted AS (SELECT count(*) AS n FROM lost)
    UPDATE backfill b SET failed = b.failed + c.n, changed_at = clock_timestamp()
      FROM counted c WHERE b.uid = p_uid AND c.n > 0;
END $$;

CREATE FUNCTION leasedjob.look_at_backfill(p_uid text)
RETURNS TABLE (through timestamptz, ticks bigint, planned bigint, skipped bigint, succeeded bigint, failed bigint,
               ids uuid[], run_keys text[])
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();
    PERFORM FROM backfill b WHERE b.uid = p_uid FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN  -- else another replica counts at this moment
        PERFORM count_ended(p_uid);
    END IF;
    RETURN QUERY
    SELECT b.through, b.ticks, b.planned, b.skipped, b.succeeded, b.failed,
           coalesce(active.ids, '{}'), coalesce(active.run_keys, '{}')
      FROM backfill b
     CROSS JOIN LATERAL (
           SELECT array_agg(r.run_id ORDER BY r.tick, s.run_key) AS ids,
                  array_agg(coalesce(s.run_key, '') ORDER BY r.tick, s.run_key) AS run_keys
             FROM backfill_run r LEFT JOIN job_scheduler s ON s.id = r.run_id
            WHERE r.uid = b.uid) active
     WHERE b.uid = p_uid;
END $$;

-- Decides the ticks after p_from, up to p_through: p_skipped of them are left as they are, and p_request, if there is one,
-- asks for a run of the last. Whoever comes second finds that the backfill has moved on. `said`: moved (somebody else was
-- faster), full (p_limit runs are active), busy, skipped, or asked: then the rest is the answer to the claim, and
-- only "claimed" has moved the backfill on.
CREATE FUNCTION leasedjob.step_backfill(
    p_cluster text, p_uid text, p_from timestamptz, p_through timestamptz, p_skipped bigint, p_limit integer,
    p_request json
)
RETURNS TABLE (
    said text, ordinal integer, verdict text, id uuid, owner_token uuid, attempt integer, fencing_token bigint,
    expires_at timestamptz, db_now timestamptz, watermark timestamptz, reason text, retry_at timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_backfill backfill;
    v_answer   claim_answer;
BEGIN
    PERFORM require_read_committed();
    SELECT * INTO v_backfill FROM backfill b WHERE b.uid = p_uid FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'busy', NULL::integer, NULL, NULL::uuid, NULL::uuid, NULL::integer, NULL::bigint,
                            NULL::timestamptz, clock_timestamp(), NULL::timestamptz, '', NULL::timestamptz;
        RETURN;
    END IF;
    v_answer.db_now := clock_timestamp();
    IF v_backfill.through <> p_from THEN
        said := 'moved';
    ELSIF p_request IS NULL THEN
        said := 'skipped';
    ELSE
        PERFORM count_ended(p_uid);
        IF (SELECT count(*) FROM backfill_run r WHERE r.uid = p_uid) >= p_limit THEN
            said := 'full';
        ELSE
            said := 'asked';
            SELECT * INTO v_answer FROM claim_batch(p_cluster, json_build_array(p_request));
            IF v_answer.verdict = 'claimed' THEN
                INSERT INTO backfill_run (uid, run_id, tick) VALUES (p_uid, v_answer.id, p_through)
                    ON CONFLICT DO NOTHING;
                -- A failed run that is run again begins to count anew.
                UPDATE job_scheduler s SET failures = 0, interruptions = 0, created_at = clock_timestamp()
                 WHERE s.id = v_answer.id AND v_answer.attempt > 1;
            END IF;
        END IF;
    END IF;
    IF said = 'skipped' OR (said = 'asked' AND v_answer.verdict = 'claimed') THEN
        UPDATE backfill b
           SET through = p_through, skipped = b.skipped + p_skipped, changed_at = clock_timestamp()
         WHERE b.uid = p_uid;
    END IF;
    RETURN QUERY SELECT said, v_answer.ordinal, v_answer.verdict, v_answer.id, v_answer.owner_token, v_answer.attempt,
                        v_answer.fencing_token, v_answer.expires_at, v_answer.db_now, v_answer.watermark,
                        coalesce(v_answer.reason, ''), v_answer.retry_at;
END $$;

REVOKE ALL ON leasedjob.tick_count, leasedjob.audit, leasedjob.backfill, leasedjob.backfill_run FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA leasedjob FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA leasedjob FROM PUBLIC;
