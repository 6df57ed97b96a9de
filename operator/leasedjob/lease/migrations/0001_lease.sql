-- The lease row, the code row, the ledger, tenants, and every function that changes them.
--
-- Rules that hold for each function here (docs/decisions/0001-lease-row-and-claim.md):
--   * It is VOLATILE plpgsql and insists on READ COMMITTED, so each of its statements sees a fresh snapshot: what it
--     decides after taking a lock is decided on what the lock's former holder committed.
--   * It reads clock_timestamp() after the lock. now() stands still from the start of the transaction.
--   * It never waits for a row lock: it skips, and says so.
--   * Locks are taken in key order: code rows before lease rows.

CREATE TYPE leasedjob.job_scheduler_type AS ENUM ('INITIAL', 'SCHEDULE');
CREATE TYPE leasedjob.job_scheduler_status AS ENUM ('RUNNING', 'SUCCESS', 'FAIL');

-- One sequence for all runs: a later acquire has a larger number, whatever run it is of.
CREATE SEQUENCE leasedjob.fencing_token AS bigint CACHE 1;

CREATE TABLE leasedjob.job_scheduler (
    id                 uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    lock_key           text NOT NULL CONSTRAINT job_scheduler_lock_key UNIQUE,
    type               leasedjob.job_scheduler_type NOT NULL,
    code               text NOT NULL,
    run_key            text,
    name               text NOT NULL DEFAULT '',
    status             leasedjob.job_scheduler_status NOT NULL DEFAULT 'RUNNING',
    outcome            text CHECK (outcome IN ('complete', 'fail', 'release')),
    owner_token        uuid NOT NULL DEFAULT gen_random_uuid(),
    attempt            integer NOT NULL DEFAULT 1,
    failures           integer NOT NULL DEFAULT 0,
    interruptions      integer NOT NULL DEFAULT 0,
    backoff_limit      integer NOT NULL DEFAULT 0,
    interruption_limit integer NOT NULL DEFAULT 20,
    fencing_token      bigint NOT NULL DEFAULT nextval('leasedjob.fencing_token'),
    lease_ms           bigint NOT NULL CHECK (lease_ms > 0),
    run_lease_ms       bigint NOT NULL CHECK (run_lease_ms > 0),
    cluster            text NOT NULL DEFAULT '',
    namespace          text NOT NULL DEFAULT '',
    job_name           text NOT NULL DEFAULT '',
    job_uid            text NOT NULL DEFAULT '',
    tenant             text NOT NULL DEFAULT '',
    holder             text NOT NULL DEFAULT '',
    pod_name           text,
    pod_uid            text,
    tick               timestamptz,
    manual             boolean NOT NULL DEFAULT false,
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    adopted_at         timestamptz,
    finished_at        timestamptz,
    stop_requested_at  timestamptz,
    stop_reason        text NOT NULL DEFAULT '',
    retry_at           timestamptz,
    reason             text NOT NULL DEFAULT '',
    data               jsonb,
    modified_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT job_scheduler_initial_has_no_run_key CHECK ((type = 'INITIAL') = (run_key IS NULL)),
    CONSTRAINT job_scheduler_retry_only_after_fail CHECK (retry_at IS NULL OR status = 'FAIL')
) WITH (fillfactor = 70);

COMMENT ON TABLE leasedjob.job_scheduler IS 'One row per logical run: who owns it, until when, and how it ended.';
COMMENT ON COLUMN leasedjob.job_scheduler.modified_at IS
    'The lease holds until modified_at + lease_ms. No index may contain it: heartbeats must stay HOT updates.';
COMMENT ON COLUMN leasedjob.job_scheduler.changed_at IS 'Moved by every transition, but not by heartbeats and renewals.';
COMMENT ON COLUMN leasedjob.job_scheduler.retry_at IS 'FAIL: from when another attempt may start; NULL: never.';

-- What may be active. Queries must repeat this predicate word for word.
CREATE INDEX job_scheduler_active ON leasedjob.job_scheduler (code) WHERE status = 'RUNNING' OR retry_at IS NOT NULL;
CREATE INDEX job_scheduler_recent ON leasedjob.job_scheduler (code, created_at);
CREATE INDEX job_scheduler_changed ON leasedjob.job_scheduler (changed_at);

CREATE TABLE leasedjob.job_code (
    code       text PRIMARY KEY,
    watermark  timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 70);
COMMENT ON TABLE leasedjob.job_code IS
    'The lock under which ticks and overlap of a code are decided, and up to which tick they are decided.';

CREATE TABLE leasedjob.job_registration (
    code          text NOT NULL REFERENCES leasedjob.job_code,
    cluster       text NOT NULL,
    namespace     text NOT NULL,
    name          text NOT NULL,
    uid           text NOT NULL,
    created_at    timestamptz NOT NULL,
    schedule_hash text NOT NULL,
    spec_hash     text NOT NULL,
    policy        text NOT NULL CHECK (policy IN ('Forbid', 'Allow', 'Replace')),
    suspended     boolean NOT NULL,
    seen_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (code, cluster)
);
CREATE INDEX job_registration_cluster ON leasedjob.job_registration (cluster);
COMMENT ON TABLE leasedjob.job_registration IS 'Which object of which cluster stands for a code.';

CREATE TABLE leasedjob.tick_ledger (
    code       text NOT NULL,
    first      timestamptz NOT NULL,
    last       timestamptz NOT NULL,
    count      bigint NOT NULL CHECK (count > 0),
    exact      boolean NOT NULL DEFAULT true,
    kind       text NOT NULL CHECK (kind IN ('skipped', 'missed')),
    reason     text NOT NULL,
    decided_by text NOT NULL,
    decided_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (code, first, kind)
);
COMMENT ON TABLE leasedjob.tick_ledger IS 'Ticks that did not run, and why; ranges where many share a reason.';

CREATE TABLE leasedjob.tenant (
    tenant     text PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE leasedjob.tenant_role (
    role       name PRIMARY KEY,
    tenant     text NOT NULL REFERENCES leasedjob.tenant,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX tenant_role_tenant ON leasedjob.tenant_role (tenant);
COMMENT ON TABLE leasedjob.tenant_role IS 'Which login role speaks for which tenant (cluster/namespace).';

-- -------------------------------------------------------------------------------------------------------------------
-- Small rules, each in one place
-- -------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION leasedjob.expires_at(p_modified_at timestamptz, p_lease_ms bigint) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN p_modified_at + p_lease_ms * interval '1 millisecond';
COMMENT ON FUNCTION leasedjob.expires_at IS 'The last instant at which the lease is valid.';

-- The one definition of "expired". VOLATILE: it reads the clock when it is evaluated.
CREATE FUNCTION leasedjob.is_expired(p_modified_at timestamptz, p_lease_ms bigint) RETURNS boolean
LANGUAGE sql VOLATILE
RETURN leasedjob.expires_at(p_modified_at, p_lease_ms) < clock_timestamp();

CREATE FUNCTION leasedjob.retry_delay(p_failures integer) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(interval '10 seconds' * power(2, least(p_failures, 10) - 1), interval '6 minutes');
COMMENT ON FUNCTION leasedjob.retry_delay IS 'After the n-th failure: 10 s, doubling, at most 6 min.';

CREATE FUNCTION leasedjob.require_read_committed() RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'leasedjob needs transaction isolation "read committed", not "%"',
            current_setting('transaction_isolation')
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'A lease must be judged by what is committed now, not by an older snapshot.';
    END IF;
END $$;

CREATE FUNCTION leasedjob.check_data(p_data jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF octet_length(p_data::text) > 262144 THEN
        RAISE EXCEPTION 'data is % bytes long as JSON text; at most 262144 are kept', octet_length(p_data::text)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- Whether the session's login role may touch runs of this tenant. Called inside SECURITY DEFINER functions, where
-- current_user is the owner of the schema; session_user can't be changed by SET ROLE.
CREATE FUNCTION leasedjob.may_touch(p_tenant text) RETURNS boolean
LANGUAGE sql STABLE
RETURN EXISTS (SELECT FROM leasedjob.tenant_role t WHERE t.role = session_user AND t.tenant = p_tenant)
    OR pg_has_role(session_user, current_user, 'USAGE');

-- Rows as an operator polls them: huge data stays where it is.
CREATE VIEW leasedjob.run_summary AS
SELECT id, lock_key, type, code, run_key, name, status, outcome, owner_token, attempt, failures, interruptions,
       backoff_limit, interruption_limit, fencing_token, lease_ms, run_lease_ms, cluster, namespace, job_name, job_uid,
       tenant, holder, pod_name, pod_uid, tick, manual, created_at, started_at, adopted_at, finished_at,
       stop_requested_at, stop_reason, retry_at, reason,
       CASE WHEN pg_column_size(data) > 4096 THEN '{"truncated": true}'::jsonb ELSE data END AS data,
       modified_at, changed_at, clock_timestamp() AS db_now
  FROM leasedjob.job_scheduler;

-- -------------------------------------------------------------------------------------------------------------------
-- How an attempt ends: the one place that writes a final state. The caller holds the row's lock and checked its right.
-- -------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION leasedjob.close_attempt(
    p_id uuid, p_outcome text, p_counts boolean, p_retry_ms bigint, p_reason text, p_data jsonb
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_now         timestamptz := clock_timestamp();
    v_failed      integer := (p_outcome = 'fail' AND p_counts)::integer;
    v_interrupted integer := (p_outcome <> 'complete' AND NOT p_counts)::integer;
BEGIN
    UPDATE job_scheduler s
       SET status = CASE WHEN p_outcome = 'complete' THEN 'SUCCESS' ELSE 'FAIL' END::job_scheduler_status,
           outcome = p_outcome,
           failures = s.failures + v_failed,
           -- A claim that no Pod adopted interrupted nothing.
           interruptions = s.interruptions + CASE WHEN s.pod_uid IS NULL THEN 0 ELSE v_interrupted END,
           retry_at = CASE
               WHEN p_outcome = 'complete' THEN NULL
               WHEN s.stop_requested_at IS NOT NULL THEN NULL  -- cancelled or replaced: no further attempt
               WHEN s.job_uid <> '' AND NOT EXISTS (SELECT FROM job_registration g WHERE g.code = s.code) THEN NULL
               WHEN p_retry_ms >= 0 THEN v_now + p_retry_ms * interval '1 millisecond'
               WHEN p_retry_ms IS NULL THEN NULL
               WHEN v_failed = 1 THEN CASE WHEN s.failures < s.backoff_limit
                   THEN v_now + retry_delay(s.failures + 1) END
               WHEN s.pod_uid IS NULL OR s.interruptions < s.interruption_limit THEN v_now
           END,
           reason = CASE
               WHEN p_outcome = 'complete' THEN coalesce(p_reason, '')
               WHEN s.stop_requested_at IS NOT NULL AND s.stop_reason <> '' THEN s.stop_reason
               WHEN p_retry_ms < 0 AND v_failed = 0 AND s.pod_uid IS NOT NULL
                    AND s.interruptions >= s.interruption_limit THEN 'InterruptionLimit'
               ELSE coalesce(p_reason, '')
           END,
           data = CASE WHEN p_outcome = 'release' THEN coalesce(p_data, '{"released": true}') ELSE p_data END,
           finished_at = v_now,
           modified_at = v_now,
           changed_at = v_now
     WHERE s.id = p_id AND s.status = 'RUNNING';
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION leasedjob.close_attempt IS
    'p_retry_ms: milliseconds until the next attempt; NULL: no more; -1: the run''s own backoff and interruption rules.';

-- Ends these runs for good: an adopted one is asked to stop, anything else gets no further attempt at once.
-- Returns the ids that are stopping or have ended; the others were locked elsewhere.
CREATE FUNCTION leasedjob.stop_runs(p_ids uuid[], p_reason text) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_locked uuid[];
BEGIN
    v_locked := ARRAY(
        SELECT s.id FROM job_scheduler s
         WHERE s.id = ANY (p_ids) AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)
         ORDER BY s.id FOR NO KEY UPDATE SKIP LOCKED);
    UPDATE job_scheduler s
       SET stop_requested_at = clock_timestamp(), stop_reason = p_reason, changed_at = clock_timestamp()
     WHERE s.id = ANY (v_locked) AND s.status = 'RUNNING' AND s.stop_requested_at IS NULL;
    -- An unadopted claim has no workload: ending it here makes adopt fail, and nothing runs.
    PERFORM close_attempt(s.id, 'release', false, NULL, p_reason, NULL)
       FROM job_scheduler s WHERE s.id = ANY (v_locked) AND s.status = 'RUNNING' AND s.pod_uid IS NULL;
    UPDATE job_scheduler s SET retry_at = NULL, reason = p_reason, changed_at = clock_timestamp()
     WHERE s.id = ANY (v_locked) AND s.status = 'FAIL' AND s.retry_at IS NOT NULL;
    RETURN ARRAY(
        SELECT s.id FROM job_scheduler s
         WHERE s.id = ANY (p_ids)
           AND (s.stop_requested_at IS NOT NULL OR (s.status <> 'RUNNING' AND s.retry_at IS NULL)));
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- Registration
-- -------------------------------------------------------------------------------------------------------------------

CREATE TYPE leasedjob.job_to_register AS (
    ordinal integer, code text, uid text, namespace text, name text, created_at timestamptz,
    schedule_hash text, spec_hash text, policy text, suspended boolean
);

CREATE FUNCTION leasedjob.register_jobs(p_cluster text, p_jobs jsonb)
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

    -- From when ticks count. Where another cluster is active with the code, its view stands: moving the watermark
    -- could drop a tick that it is about to claim.
    UPDATE job_code c
       SET watermark = greatest(c.watermark, moved.watermark)
      FROM (SELECT j.code,
                   greatest(
                       CASE WHEN NOT other.active AND g.uid IS DISTINCT FROM j.uid
                            THEN least(j.created_at, clock_timestamp()) END,
                       CASE WHEN NOT other.active AND g.suspended AND NOT j.suspended THEN clock_timestamp() END,
                       CASE WHEN g.schedule_hash <> j.schedule_hash AND NOT other.same_schedule
                            THEN clock_timestamp() END) AS watermark
              FROM unnest(v_jobs) j
              JOIN unnest(v_locked) l (code) ON l.code = j.code
              LEFT JOIN job_registration g ON g.code = j.code AND g.cluster = p_cluster
             CROSS JOIN LATERAL (
                   SELECT count(*) > 0 AS active,
                          coalesce(bool_or(o.schedule_hash = j.schedule_hash), false) AS same_schedule
                     FROM job_registration o
                    WHERE o.code = j.code AND o.cluster <> p_cluster AND NOT o.suspended) other) moved
     WHERE c.code = moved.code AND moved.watermark > c.watermark;

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

CREATE FUNCTION leasedjob.unregister_jobs(p_cluster text, p_codes text[]) RETURNS text[]
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
-- Claiming
-- -------------------------------------------------------------------------------------------------------------------

CREATE TYPE leasedjob.claim_request AS (
    ordinal integer, type leasedjob.job_scheduler_type, code text, run_key text, lock_key text, tick timestamptz,
    name text, namespace text, job_name text, job_uid text, tenant text, lease_ms bigint, run_lease_ms bigint,
    on_overlap text, starting_deadline_ms bigint, backoff_limit integer, interruption_limit integer,
    manual boolean, reopen boolean, dropped jsonb
);
-- What is to be done about a request. `action` is a verdict, or one of insert, reclaim, end, replace.
CREATE TYPE leasedjob.claim_decision AS (
    request leasedjob.claim_request, action text, id uuid, attempt integer, expires_at timestamptz,
    reason text, retry_at timestamptz
);
CREATE TYPE leasedjob.claim_answer AS (
    ordinal integer, verdict text, id uuid, owner_token uuid, attempt integer, fencing_token bigint,
    expires_at timestamptz, db_now timestamptz, watermark timestamptz, reason text, retry_at timestamptz
);

-- Writes tick ranges that the watermark is about to pass. Ranges at or before it were decided by somebody else.
CREATE FUNCTION leasedjob.write_ledger(p_cluster text, p_code text, p_watermark timestamptz, p_ranges jsonb)
RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    INSERT INTO leasedjob.tick_ledger (code, first, last, count, exact, kind, reason, decided_by)
    SELECT p_code, x.first, x.last, x.count, coalesce(x.exact, true), x.kind, x.reason, p_cluster
      FROM jsonb_to_recordset(p_ranges)
           AS x (first timestamptz, last timestamptz, count bigint, exact boolean, kind text, reason text)
     WHERE x.first > p_watermark
     ORDER BY x.first
        ON CONFLICT DO NOTHING;
END;

-- Whether the watermark stands inside one of the ranges: then they were computed from an older watermark, and their
-- counts are not the truth any more.
CREATE FUNCTION leasedjob.ranges_are_stale(p_watermark timestamptz, p_ranges jsonb) RETURNS boolean
LANGUAGE sql STABLE
RETURN EXISTS (
    SELECT FROM jsonb_to_recordset(p_ranges) AS x (first timestamptz, last timestamptz)
     WHERE x.first <= p_watermark AND x.last > p_watermark);

CREATE FUNCTION leasedjob.claim_runs(p_cluster text, p_requests jsonb) RETURNS SETOF leasedjob.claim_answer
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_open     claim_request[];   -- not answered yet
    v_batch    claim_request[];   -- of this round: one request per code
    v_decided  claim_decision[];
    v_answers  claim_answer[] := '{}';
    v_new      claim_answer[];
    -- Objects, not arrays: looking a key up stays cheap, whatever plan is cached.
    v_locked   jsonb;             -- {code: true}: codes whose lock we hold
    v_rows     jsonb;             -- {id: true}: lease rows whose lock we hold
    v_waiting  text[] := '{}';    -- codes with a tick that has to wait: a later one must not pass it
    v_victims  uuid[];
    v_rounds   integer;
BEGIN
    PERFORM require_read_committed();
    v_open := ARRAY(SELECT r FROM jsonb_populate_recordset(NULL::claim_request, p_requests) r ORDER BY r.ordinal);

    -- Runs that nobody can claim now are answered without a lock: at a tick, every replica but one is done here.
    v_answers := ARRAY(
        SELECT ROW(r.ordinal,
                   CASE s.status WHEN 'SUCCESS' THEN 'completed' WHEN 'RUNNING' THEN 'held'
                        ELSE CASE WHEN s.retry_at IS NULL THEN 'exhausted' ELSE 'backoff' END END,
                   s.id, NULL, s.attempt, s.fencing_token, expires_at(s.modified_at, s.lease_ms), clock_timestamp(),
                   NULL, s.reason, s.retry_at)::claim_answer
          FROM unnest(v_open) r JOIN job_scheduler s ON s.lock_key = r.lock_key
         WHERE CASE s.status
                   WHEN 'SUCCESS' THEN true
                   WHEN 'RUNNING' THEN NOT is_expired(s.modified_at, s.lease_ms)
                   ELSE (s.retry_at IS NULL OR s.retry_at > clock_timestamp()) AND NOT (r.manual AND r.reopen)
               END);
    IF cardinality(v_answers) > 0 THEN
        v_open := ARRAY(SELECT r FROM unnest(v_open) r
                         WHERE NOT EXISTS (SELECT FROM unnest(v_answers) a WHERE a.ordinal = r.ordinal)
                         ORDER BY r.ordinal);
    END IF;
    IF cardinality(v_open) = 0 THEN
        RETURN QUERY SELECT * FROM unnest(v_answers);
        RETURN;
    END IF;

    SELECT coalesce(jsonb_object_agg(locked.code, true), '{}') INTO v_locked
      FROM (SELECT c.code FROM job_code c
             WHERE c.code IN (SELECT r.code FROM unnest(v_open) r)
             ORDER BY c.code FOR NO KEY UPDATE SKIP LOCKED) locked;
    SELECT coalesce(jsonb_object_agg(locked.id, true), '{}') INTO v_rows
      FROM (SELECT s.id FROM job_scheduler s
             WHERE s.lock_key IN (SELECT r.lock_key FROM unnest(v_open) r WHERE v_locked ? r.code)
             ORDER BY s.lock_key FOR NO KEY UPDATE SKIP LOCKED) locked;
    -- Other runs of these codes that look expired: only one whose lock we hold has surely expired, for a heartbeat that
    -- was in time may not have committed yet.
    SELECT v_rows || coalesce(jsonb_object_agg(locked.id, true), '{}') INTO v_rows
      FROM (SELECT s.id FROM job_scheduler s
             WHERE s.code IN (SELECT r.code FROM unnest(v_open) r WHERE v_locked ? r.code)
               AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)
               AND s.status = 'RUNNING' AND is_expired(s.modified_at, s.lease_ms)
             ORDER BY s.lock_key FOR NO KEY UPDATE SKIP LOCKED) locked;

    -- What is locked elsewhere is not decided now.
    v_new := ARRAY(
        SELECT ROW(r.ordinal,
                   CASE WHEN v_locked ? r.code OR registered.mine THEN 'busy' ELSE 'unregistered' END,
                   s.id, NULL, s.attempt, s.fencing_token,
                   CASE WHEN s.status = 'RUNNING' THEN expires_at(s.modified_at, s.lease_ms) END, clock_timestamp(),
                   NULL,
                   CASE WHEN v_locked ? r.code THEN 'the lease row is locked'
                        WHEN registered.mine THEN 'the code is locked' ELSE '' END,
                   s.retry_at)::claim_answer
          FROM unnest(v_open) r
          LEFT JOIN job_scheduler s ON s.lock_key = r.lock_key
         CROSS JOIN LATERAL (
               SELECT EXISTS (SELECT FROM job_registration g
                               WHERE g.code = r.code AND g.cluster = p_cluster AND g.uid = r.job_uid) AS mine
               ) registered
         WHERE NOT v_locked ? r.code OR NOT v_rows ? s.id::text);
    IF cardinality(v_new) > 0 THEN
        v_answers := v_answers || v_new;
        v_open := ARRAY(SELECT r FROM unnest(v_open) r
                         WHERE NOT EXISTS (SELECT FROM unnest(v_new) a WHERE a.ordinal = r.ordinal)
                         ORDER BY r.ordinal);
    END IF;

    SELECT coalesce(max(n), 0) INTO v_rounds
      FROM (SELECT count(*) AS n FROM unnest(v_open) r GROUP BY r.code) per_code;

    -- Requests of one code are decided one after the other, each seeing what the one before wrote.
    FOR v_round IN 1..v_rounds LOOP
        v_batch := ARRAY(
            SELECT numbered.r
              FROM (SELECT r, row_number() OVER (PARTITION BY r.code ORDER BY r.ordinal) AS n
                      FROM unnest(v_open) r) numbered
             WHERE numbered.n = v_round);

        FOR v_pass IN 1..2 LOOP
            v_decided := ARRAY(
                SELECT ROW(r, decided.action, s.id, s.attempt,
                           CASE WHEN s.status = 'RUNNING' THEN expires_at(s.modified_at, s.lease_ms) END,
                           CASE WHEN decided.action = 'busy' THEN 'the watermark moved'
                                WHEN decided.action = 'end' AND s.stop_requested_at IS NULL THEN 'InterruptionLimit'
                                WHEN decided.action = 'end' THEN s.stop_reason
                                ELSE coalesce(s.reason, '') END,
                           s.retry_at)::claim_decision
                  FROM unnest(v_batch) r
                 CROSS JOIN LATERAL (
                       SELECT coalesce(bool_or(g.cluster = p_cluster AND g.uid = r.job_uid), false) AS mine,
                              CASE WHEN bool_or(g.policy = 'Forbid' AND NOT g.suspended AND g.cluster <> p_cluster)
                                        AND r.on_overlap IN ('allow', 'replace')
                                   THEN CASE WHEN r.manual THEN 'wait' ELSE 'skip' END
                                   WHEN bool_or(g.policy = 'Replace' AND NOT g.suspended AND g.cluster <> p_cluster)
                                        AND r.on_overlap = 'allow'
                                   THEN 'replace'
                                   ELSE r.on_overlap END AS on_overlap
                         FROM job_registration g WHERE g.code = r.code) registered
                  JOIN job_code c ON c.code = r.code
                  LEFT JOIN job_scheduler s ON s.lock_key = r.lock_key
                  LEFT JOIN LATERAL (
                       SELECT count(*) FILTER (WHERE o.status = 'RUNNING'
                                  AND (NOT is_expired(o.modified_at, o.lease_ms) OR NOT v_rows ? o.id::text)) AS running,
                              count(*) FILTER (WHERE o.status = 'FAIL') AS retrying
                         FROM job_scheduler o
                        WHERE o.code = r.code AND (o.status = 'RUNNING' OR o.retry_at IS NOT NULL)
                          AND o.lock_key <> r.lock_key) others ON registered.on_overlap <> 'allow'
                 CROSS JOIN LATERAL (SELECT CASE
                       WHEN NOT registered.mine THEN 'unregistered'
                       WHEN s.id IS NULL THEN CASE
                           WHEN r.tick > clock_timestamp() THEN 'future'
                           WHEN NOT r.manual AND r.tick <= c.watermark THEN 'past'
                           WHEN NOT r.manual AND r.code = ANY (v_waiting) THEN 'overlap_wait'
                           WHEN r.dropped <> '[]' AND ranges_are_stale(c.watermark, r.dropped) THEN 'busy'
                           WHEN NOT r.manual
                                AND r.tick + r.starting_deadline_ms * interval '1 millisecond' < clock_timestamp()
                                THEN 'missed'
                           WHEN others.running + others.retrying > 0 THEN CASE
                               WHEN registered.on_overlap = 'skip' AND NOT r.manual AND r.tick IS NOT NULL
                                    THEN 'overlap_skipped'
                               WHEN registered.on_overlap = 'replace' AND v_pass = 1 THEN 'replace'
                               ELSE 'overlap_wait' END
                           ELSE 'insert' END
                       WHEN s.status = 'SUCCESS' THEN 'completed'
                       WHEN s.status = 'RUNNING' AND NOT is_expired(s.modified_at, s.lease_ms) THEN 'held'
                       WHEN s.status = 'RUNNING' AND s.stop_requested_at IS NOT NULL THEN 'end'
                       WHEN s.status = 'RUNNING' AND s.pod_uid IS NOT NULL AND s.interruptions >= r.interruption_limit
                            THEN 'end'
                       WHEN s.status = 'FAIL' AND s.retry_at IS NULL AND NOT (r.manual AND r.reopen) THEN 'exhausted'
                       WHEN s.retry_at > clock_timestamp() AND NOT (r.manual AND r.reopen) THEN 'backoff'
                       -- A run that began before needs only the others to stand still: two runs that both wait for
                       -- their retry must not wait for each other.
                       WHEN others.running > 0 THEN 'overlap_wait'
                       ELSE 'reclaim' END AS action) decided);

            v_victims := ARRAY(
                SELECT o.id
                  FROM unnest(v_decided) d JOIN job_scheduler o ON o.code = (d.request).code
                 WHERE d.action = 'replace' AND (o.status = 'RUNNING' OR o.retry_at IS NOT NULL));
            EXIT WHEN cardinality(v_victims) = 0;
            PERFORM stop_runs(v_victims, 'Replaced');
        END LOOP;

        WITH fresh AS (
            INSERT INTO job_scheduler AS s (lock_key, type, code, run_key, name, backoff_limit, interruption_limit,
                                            lease_ms, run_lease_ms, cluster, namespace, job_name, job_uid, tenant, tick,
                                            manual)
            SELECT (d.request).lock_key, (d.request).type, (d.request).code, (d.request).run_key, (d.request).name,
                   (d.request).backoff_limit, (d.request).interruption_limit, (d.request).lease_ms,
                   (d.request).run_lease_ms, p_cluster, (d.request).namespace, (d.request).job_name,
                   (d.request).job_uid, (d.request).tenant, (d.request).tick, (d.request).manual
              FROM unnest(v_decided) d
             WHERE d.action = 'insert'
             ORDER BY (d.request).lock_key
                ON CONFLICT (lock_key) DO NOTHING
            RETURNING s.id, s.lock_key, s.owner_token, s.attempt, s.fencing_token, s.modified_at, s.lease_ms
        ), reclaimed AS (
            UPDATE job_scheduler s
               SET status = 'RUNNING', outcome = NULL, owner_token = gen_random_uuid(), attempt = s.attempt + 1,
                   fencing_token = nextval('leasedjob.fencing_token'),
                   interruptions = s.interruptions
                                 + CASE WHEN s.status = 'RUNNING' AND s.pod_uid IS NOT NULL THEN 1 ELSE 0 END,
                   name = (d.request).name, backoff_limit = (d.request).backoff_limit,
                   interruption_limit = (d.request).interruption_limit, lease_ms = (d.request).lease_ms,
                   run_lease_ms = (d.request).run_lease_ms, cluster = p_cluster, namespace = (d.request).namespace,
                   job_name = (d.request).job_name, job_uid = (d.request).job_uid, tenant = (d.request).tenant,
                   manual = (d.request).manual, holder = '', pod_name = NULL, pod_uid = NULL, adopted_at = NULL,
                   finished_at = NULL, stop_requested_at = NULL, stop_reason = '', retry_at = NULL, reason = '',
                   data = NULL, started_at = clock_timestamp(), modified_at = clock_timestamp(),
                   changed_at = clock_timestamp()
              FROM unnest(v_decided) d
             -- The row is ours since it was locked, unless it came into being after that: then the last two lines decide.
             WHERE d.action = 'reclaim' AND s.id = d.id AND s.attempt = d.attempt
               AND (s.status = 'FAIL' OR (s.status = 'RUNNING' AND is_expired(s.modified_at, s.lease_ms)))
            RETURNING s.id, s.lock_key, s.owner_token, s.attempt, s.fencing_token, s.modified_at, s.lease_ms
        ), taken AS (
            SELECT * FROM fresh UNION ALL SELECT * FROM reclaimed
        )
        SELECT coalesce(array_agg(ROW(
                   (d.request).ordinal,
                   CASE WHEN t.id IS NOT NULL THEN 'claimed'
                        WHEN d.action = 'end' THEN 'exhausted'
                        WHEN d.action IN ('insert', 'reclaim') THEN 'busy'
                        WHEN d.action = 'replace' THEN 'overlap_wait'
                        ELSE d.action END,
                   coalesce(t.id, d.id), t.owner_token, coalesce(t.attempt, d.attempt), t.fencing_token,
                   coalesce(expires_at(t.modified_at, t.lease_ms), d.expires_at), clock_timestamp(), NULL,
                   CASE WHEN t.id IS NOT NULL THEN '' ELSE d.reason END,
                   CASE WHEN t.id IS NULL THEN d.retry_at END)::claim_answer), '{}')
          INTO v_new
          FROM unnest(v_decided) d LEFT JOIN taken t ON t.lock_key = (d.request).lock_key;

        -- An expired attempt that has no successor: the last interruption is the final one.
        PERFORM close_attempt(d.id, 'release', false, NULL, d.reason, NULL)
           FROM unnest(v_decided) d WHERE d.action = 'end';

        -- Whatever moves the watermark writes down what it passes, first.
        PERFORM write_ledger(p_cluster, c.code, c.watermark,
                    coalesce((d.request).dropped, '[]') || CASE a.verdict
                        WHEN 'claimed' THEN '[]'::jsonb
                        ELSE jsonb_build_array(jsonb_build_object(
                            'first', (d.request).tick, 'last', (d.request).tick, 'count', 1, 'exact', true,
                            'kind', CASE a.verdict WHEN 'missed' THEN 'missed' ELSE 'skipped' END,
                            'reason', CASE a.verdict WHEN 'missed' THEN 'StartingDeadline' ELSE 'Overlap' END)) END)
           FROM unnest(v_decided) d
           JOIN unnest(v_new) a ON a.ordinal = (d.request).ordinal
           JOIN job_code c ON c.code = (d.request).code
          WHERE NOT (d.request).manual AND (d.request).tick > c.watermark
            AND (a.verdict IN ('missed', 'overlap_skipped')
                 OR (a.verdict = 'claimed' AND (d.request).dropped <> '[]'));
        UPDATE job_code c
           SET watermark = (d.request).tick
          FROM unnest(v_decided) d JOIN unnest(v_new) a ON a.ordinal = (d.request).ordinal
         WHERE c.code = (d.request).code AND NOT (d.request).manual AND (d.request).tick > c.watermark
           AND a.verdict IN ('claimed', 'missed', 'overlap_skipped');

        IF v_rounds > 1 THEN
            v_waiting := v_waiting || ARRAY(
                SELECT (d.request).code
                  FROM unnest(v_decided) d JOIN unnest(v_new) a ON a.ordinal = (d.request).ordinal
                 WHERE NOT (d.request).manual AND d.id IS NULL AND a.verdict IN ('overlap_wait', 'future', 'busy'));
        END IF;
        v_answers := v_answers || v_new;
    END LOOP;

    RETURN QUERY
    SELECT a.ordinal, a.verdict, a.id, a.owner_token, a.attempt, a.fencing_token, a.expires_at, a.db_now,
           c.watermark, a.reason, a.retry_at
      FROM unnest(v_answers) a
      LEFT JOIN unnest(v_open) r ON r.ordinal = a.ordinal
      LEFT JOIN job_code c ON c.code = r.code;
END $$;

CREATE FUNCTION leasedjob.record_ticks(
    p_cluster text, p_code text, p_through timestamptz, p_ranges jsonb, OUT recorded boolean, OUT watermark timestamptz
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

CREATE FUNCTION leasedjob.renew_claims(p_cluster text, p_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_locked  uuid[];
    v_renewed uuid[];
BEGIN
    PERFORM require_read_committed();
    v_locked := ARRAY(
        SELECT s.id FROM job_scheduler s
         WHERE s.id = ANY (p_ids) AND s.cluster = p_cluster AND s.status = 'RUNNING' AND s.pod_uid IS NULL
         ORDER BY s.id FOR NO KEY UPDATE SKIP LOCKED);
    WITH renewed AS (
        UPDATE job_scheduler s SET modified_at = clock_timestamp()
         WHERE s.id = ANY (v_locked) AND NOT is_expired(s.modified_at, s.lease_ms)
        RETURNING s.id)
    SELECT coalesce(array_agg(r.id), '{}') INTO v_renewed FROM renewed r;
    RETURN v_renewed;
END $$;

CREATE FUNCTION leasedjob.release_claim(p_id uuid, p_token uuid, p_reason text, p_retry_ms bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM FROM job_scheduler s
      WHERE s.id = p_id AND s.owner_token = p_token AND s.status = 'RUNNING' AND s.pod_uid IS NULL
        FOR NO KEY UPDATE NOWAIT;
    RETURN FOUND AND close_attempt(p_id, 'release', false, p_retry_ms, p_reason, NULL);
END $$;

CREATE FUNCTION leasedjob.end_attempt(
    p_id uuid, p_attempt integer, p_pod_uid text, p_outcome text, p_counts boolean, p_retry_ms bigint, p_reason text,
    p_data jsonb
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM check_data(p_data);
    PERFORM FROM job_scheduler s
      WHERE s.id = p_id AND s.attempt = p_attempt AND s.status = 'RUNNING' AND s.pod_uid IS NOT DISTINCT FROM p_pod_uid
        FOR NO KEY UPDATE NOWAIT;
    RETURN FOUND AND close_attempt(p_id, p_outcome, p_counts, p_retry_ms, p_reason, p_data);
END $$;
COMMENT ON FUNCTION leasedjob.end_attempt IS 'Also after expiry: finished work is recorded as long as nobody reclaimed.';

CREATE FUNCTION leasedjob.request_stop(p_ids uuid[], p_reason text) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    RETURN stop_runs(p_ids, p_reason);
END $$;

-- -------------------------------------------------------------------------------------------------------------------
-- The three functions that a tenant's role may execute. A row is locked only for a role of its tenant that shows its
-- token: nobody else can hold up a heartbeat by keeping a lock.
-- -------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION leasedjob.adopt(
    p_id uuid, p_claim_token uuid, p_new_token uuid, p_pod_uid text, p_pod_name text,
    OUT verdict text, OUT reason text, OUT lease_ms bigint, OUT attempt integer, OUT fencing_token bigint,
    OUT lock_key text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_row job_scheduler;
BEGIN
    PERFORM require_read_committed();
    IF p_new_token IS NULL OR p_pod_uid IS NULL OR p_pod_uid = '' THEN
        RAISE EXCEPTION 'adopt needs a new token and a Pod uid' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    SELECT * INTO v_row FROM job_scheduler s WHERE s.id = p_id;
    IF NOT FOUND THEN
        verdict := 'lost';
        reason := 'there is no such lease';
        RETURN;
    END IF;
    IF NOT may_touch(v_row.tenant) THEN
        verdict := 'refused';
        reason := format('database role %s does not belong to this run''s namespace', quote_ident(session_user));
        RETURN;
    END IF;

    -- The claim as it was given out, or our own adoption whose answer was lost.
    SELECT * INTO v_row FROM job_scheduler s
     WHERE s.id = p_id AND s.status = 'RUNNING' AND may_touch(s.tenant)
       AND ((s.owner_token = p_claim_token AND s.pod_uid IS NULL)
            OR (s.owner_token = p_new_token AND s.pod_uid = p_pod_uid))
       FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        SELECT * INTO v_row FROM job_scheduler s WHERE s.id = p_id;
        IF v_row.status = 'RUNNING' AND ((v_row.owner_token = p_claim_token AND v_row.pod_uid IS NULL)
                                         OR (v_row.owner_token = p_new_token AND v_row.pod_uid = p_pod_uid)) THEN
            verdict := 'busy';
            reason := 'the lease row is locked elsewhere';
        ELSIF v_row.status = 'RUNNING' AND v_row.pod_uid <> p_pod_uid THEN
            verdict := 'taken';
            reason := format('Pod %s has adopted attempt %s', v_row.pod_name, v_row.attempt);
        ELSE
            verdict := 'lost';
            reason := CASE
                WHEN v_row.status <> 'RUNNING' THEN
                    format('attempt %s has ended as %s%s', v_row.attempt, v_row.status,
                           CASE WHEN v_row.reason <> '' THEN ' (' || v_row.reason || ')' ELSE '' END)
                ELSE format('the claim token is not the one of attempt %s', v_row.attempt) END;
        END IF;
        RETURN;
    END IF;
    IF v_row.stop_requested_at IS NOT NULL THEN
        verdict := 'lost';
        reason := format('the run was asked to stop (%s)', v_row.stop_reason);
        RETURN;
    END IF;
    UPDATE job_scheduler s
       SET owner_token = p_new_token, pod_uid = left(p_pod_uid, 128), pod_name = left(p_pod_name, 253),
           holder = s.cluster || '/' || s.namespace || '/' || left(p_pod_name, 253),
           adopted_at = coalesce(s.adopted_at, clock_timestamp()), lease_ms = s.run_lease_ms,
           modified_at = clock_timestamp(),
           changed_at = CASE WHEN s.pod_uid IS NULL THEN clock_timestamp() ELSE s.changed_at END
     WHERE s.id = p_id AND NOT is_expired(s.modified_at, s.lease_ms)
    RETURNING 'adopted', '', s.lease_ms, s.attempt, s.fencing_token, s.lock_key
      INTO verdict, reason, lease_ms, attempt, fencing_token, lock_key;
    IF NOT FOUND THEN
        verdict := 'expired';
        reason := 'the claim had expired by the database''s clock';
    END IF;
END $$;

CREATE FUNCTION leasedjob.heartbeat(
    p_id uuid, p_token uuid, OUT held boolean, OUT stop_requested boolean, OUT busy boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    held := false;
    stop_requested := false;
    busy := false;
    PERFORM FROM job_scheduler s
      WHERE s.id = p_id AND s.owner_token = p_token AND s.status = 'RUNNING' AND may_touch(s.tenant)
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        busy := EXISTS (
            SELECT FROM job_scheduler s
             WHERE s.id = p_id AND s.owner_token = p_token AND s.status = 'RUNNING' AND may_touch(s.tenant)
               AND NOT is_expired(s.modified_at, s.lease_ms));
        RETURN;
    END IF;
    UPDATE job_scheduler s SET modified_at = clock_timestamp()
     WHERE s.id = p_id AND NOT is_expired(s.modified_at, s.lease_ms)
    RETURNING s.stop_requested_at IS NOT NULL INTO stop_requested;
    held := FOUND;
    stop_requested := coalesce(stop_requested, false);
END $$;

CREATE FUNCTION leasedjob.finish(p_id uuid, p_token uuid, p_outcome text, p_data jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM check_data(p_data);
    IF p_outcome IS NULL OR p_outcome NOT IN ('complete', 'fail', 'release') THEN
        RAISE EXCEPTION 'outcome must be complete, fail or release' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM FROM job_scheduler s
      WHERE s.id = p_id AND s.owner_token = p_token AND s.status = 'RUNNING' AND may_touch(s.tenant)
        FOR NO KEY UPDATE NOWAIT;
    IF FOUND THEN
        RETURN close_attempt(p_id, p_outcome, p_outcome = 'fail', -1, '', p_data);
    END IF;
    -- The answer to an earlier call was lost: the same outcome by the same owner is recorded already.
    RETURN EXISTS (SELECT FROM job_scheduler s
                    WHERE s.id = p_id AND s.owner_token = p_token AND s.status <> 'RUNNING' AND s.outcome = p_outcome
                      AND may_touch(s.tenant));
END $$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA leasedjob FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA leasedjob FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA leasedjob FROM PUBLIC;
