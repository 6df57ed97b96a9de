-- The same claims in fewer passes over the batch: the decision is one function, and deciding, inserting, moving the
-- watermarks and answering are one statement after the locks. `claim_batch` answers as `claim_runs` did, which stays for
-- operators of the previous version.

-- What is to be done about each request, by what is committed now. `action` is a verdict, or one of insert, reclaim,
-- end, replace. It is inlined where it is called: its clock is read row by row, after the locks that it is given.
CREATE FUNCTION leasedjob.decide_claims(
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
COMMENT ON FUNCTION leasedjob.decide_claims IS
    'p_locked: {code: true} whose lock the caller holds; p_rows: {id: true}, the same of lease rows; p_waiting: codes with '
    'an earlier tick that has to wait.';

-- Decides requests, at most one of each code, and does what was decided. `halted`: a tick that has to wait; `replaced`:
-- what stands in its way is to be told to stop.
CREATE FUNCTION leasedjob.take_runs(
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
               CASE d.action WHEN 'insert' THEN gen_random_uuid() WHEN 'reclaim' THEN d.id END AS new_id,
               CASE WHEN d.action IN ('insert', 'reclaim') THEN gen_random_uuid() END AS new_owner,
               CASE WHEN d.action IN ('insert', 'reclaim')
                    THEN nextval('leasedjob.fencing_token') END AS new_token
          FROM decide_claims(p_cluster, p_requests, p_locked, p_rows, p_waiting) d
    ), fresh AS (
        INSERT INTO job_scheduler AS s (
               id, owner_token, fencing_token, lock_key, type, code, run_key, name, backoff_limit,
               interruption_limit, lease_ms, run_lease_ms, cluster, namespace, job_name, job_uid, tenant, tick,
               manual, modified_at)
        SELECT d.new_id, d.new_owner, d.new_token, d.lock_key, d.type, d.code, d.run_key, d.name,
               d.backoff_limit, d.interruption_limit, d.lease_ms, d.run_lease_ms, p_cluster, d.namespace,
               d.job_name, d.job_uid, d.tenant, d.tick, d.manual, d.taken_at
          FROM decided d
         WHERE d.action = 'insert'
         ORDER BY d.code  -- whose locks we hold; two of the indexes are in this order
            ON CONFLICT (lock_key) DO NOTHING
        RETURNING s.lock_key
    ), reclaimed AS (
        UPDATE job_scheduler s
           SET status = 'RUNNING', outcome = NULL, owner_token = d.new_owner, attempt = s.attempt + 1,
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
         WHERE d.action = 'reclaim' AND s.id = d.id AND s.attempt = d.attempt
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
                            WHEN d.action = 'end' THEN 'exhausted'
                            WHEN d.action = 'replace' THEN 'overlap_wait'
                            ELSE d.action END AS verdict
                  FROM decided d
                OFFSET 0) v
    ), moved AS (
        UPDATE job_code c SET watermark = a.tick FROM answered a WHERE a.moves AND c.code = a.code
    )
    SELECT done.ordinal, done.verdict,
           CASE WHEN done.claimed THEN done.new_id ELSE done.id END,
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

CREATE FUNCTION leasedjob.claim_batch(p_cluster text, p_requests json) RETURNS SETOF leasedjob.claim_answer
LANGUAGE plpgsql VOLATILE
SET search_path = leasedjob, pg_temp
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_default  claim_request;
    v_open     claim_request[];   -- everything that is asked
    v_batch    claim_request[];   -- of this round: one request per code
    v_locked   jsonb;             -- {code: true}: codes whose lock we hold. Objects: looking a key up stays cheap
    v_rows     jsonb;             -- {id: true}: lease rows whose lock we hold
    v_waiting  text[] := '{}';    -- codes with a tick that has to wait: a later one must not pass it
    v_rounds   bigint;
    v_reopens  boolean;
    v_alone    boolean;           -- no code is asked for twice, and nothing is to be replaced
    v_new      claim_answer[];
    v_halted   text[];
    v_replaced integer[];
BEGIN
    PERFORM require_read_committed();
    -- What a request leaves out.
    v_default.type := 'SCHEDULE';
    v_default.backoff_limit := 0;
    v_default.manual := false;
    v_default.reopen := false;
    v_default.dropped := '[]';
    v_open := ARRAY(SELECT r FROM json_populate_recordset(v_default, p_requests) r ORDER BY r.ordinal);

    -- Codes are locked in key order: of ticks that are not decided yet, and of runs that may be claimed again. At a tick,
    -- every replica but one finds that nothing is left to be claimed, and locks nothing.
    SELECT coalesce(jsonb_object_agg(locked.code, true), '{}') INTO v_locked
      FROM (SELECT c.code
              FROM unnest(v_open) r
              JOIN job_code c ON c.code = r.code
              LEFT JOIN LATERAL (
                   SELECT true AS found,
                          CASE s.status
                              WHEN 'SUCCESS' THEN false
                              WHEN 'RUNNING' THEN is_expired(s.modified_at, s.lease_ms)
                              ELSE s.retry_at <= clock_timestamp() OR (r.manual AND r.reopen) END AS claimable
                     FROM job_scheduler s
                    WHERE s.lock_key = r.lock_key AND (r.manual OR r.tick IS NULL OR r.tick <= c.watermark)
                   OFFSET 0) run ON true
             WHERE run.found IS NULL OR run.claimable
             ORDER BY c.code FOR NO KEY UPDATE OF c SKIP LOCKED) locked;

    -- Then the lease rows: those that may be claimed again, and other runs of these codes that look expired. Only one
    -- whose lock we hold has surely expired, for a heartbeat that was in time may not have committed yet.
    SELECT coalesce(jsonb_object_agg(locked.id, true), '{}') INTO v_rows
      FROM (SELECT s.id FROM job_scheduler s
             WHERE s.code IN (SELECT jsonb_object_keys(v_locked))
               AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)
               AND (s.status = 'RUNNING' AND is_expired(s.modified_at, s.lease_ms)
                    OR s.status = 'FAIL' AND s.lock_key IN (SELECT r.lock_key FROM unnest(v_open) r))
             ORDER BY s.lock_key FOR NO KEY UPDATE SKIP LOCKED) locked;

    SELECT coalesce(max(per_code.n), 0), coalesce(bool_or(per_code.reopens), false),
           coalesce(max(per_code.n) = 1 AND bool_and(per_code.yields), true)
      INTO v_rounds, v_reopens, v_alone
      FROM (SELECT count(*) AS n, bool_or(r.manual AND r.reopen) AS reopens,
                   bool_and(r.on_overlap IN ('skip', 'wait')) AS yields
              FROM unnest(v_open) r GROUP BY r.code) per_code;
    IF v_reopens THEN  -- runs without a retry left, which a person asks for again
        SELECT v_rows || coalesce(jsonb_object_agg(locked.id, true), '{}') INTO v_rows
          FROM (SELECT s.id FROM job_scheduler s
                 WHERE s.lock_key IN (SELECT r.lock_key FROM unnest(v_open) r
                                       WHERE r.manual AND r.reopen AND v_locked ? r.code)
                   AND s.status = 'FAIL' AND s.retry_at IS NULL
                 ORDER BY s.lock_key FOR NO KEY UPDATE SKIP LOCKED) locked;
    END IF;

    IF v_alone THEN
        RETURN QUERY
        SELECT t.ordinal, t.verdict, t.id, t.owner_token, t.attempt, t.fencing_token, t.expires_at, t.db_now,
               t.watermark, t.reason, t.retry_at
          FROM take_runs(p_cluster, v_open, v_locked, v_rows, v_waiting) t;
        RETURN;
    END IF;

    -- Requests of one code are decided one after the other, each seeing what the one before wrote.
    FOR v_round IN 1..v_rounds LOOP
        v_batch := ARRAY(
            SELECT numbered.r
              FROM (SELECT r, row_number() OVER (PARTITION BY r.code ORDER BY r.ordinal) AS n
                      FROM unnest(v_open) r) numbered
             WHERE numbered.n = v_round);
        FOR v_pass IN 1..2 LOOP
            SELECT array_agg(ROW(t.ordinal, t.verdict, t.id, t.owner_token, t.attempt, t.fencing_token, t.expires_at,
                                 t.db_now, t.watermark, t.reason, t.retry_at)::claim_answer)
                       FILTER (WHERE v_pass = 2 OR NOT t.replaced),
                   array_agg(t.code) FILTER (WHERE t.halted AND (v_pass = 2 OR NOT t.replaced)),
                   array_agg(t.ordinal) FILTER (WHERE t.replaced)
              INTO v_new, v_halted, v_replaced
              FROM take_runs(p_cluster, v_batch, v_locked, v_rows, v_waiting) t;
            RETURN QUERY SELECT a.* FROM unnest(v_new) a;
            v_waiting := v_waiting || v_halted;

            EXIT WHEN v_replaced IS NULL OR v_pass = 2;
            -- What stands in the way is told to stop; what has ended by that doesn't stand in the way any more.
            v_batch := ARRAY(SELECT r FROM unnest(v_batch) r WHERE r.ordinal = ANY (v_replaced));
            PERFORM stop_runs(ARRAY(
                SELECT o.id FROM unnest(v_batch) r
                  JOIN job_scheduler o ON o.code = r.code AND (o.status = 'RUNNING' OR o.retry_at IS NOT NULL)), 'Replaced');
        END LOOP;
    END LOOP;
END $$;
COMMENT ON FUNCTION leasedjob.claim_batch IS
    'Of a request, type, backoff_limit, manual, reopen and dropped may be left out.';

-- As operators of the previous version ask.
CREATE OR REPLACE FUNCTION leasedjob.claim_runs(p_cluster text, p_requests jsonb)
RETURNS SETOF leasedjob.claim_answer
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT * FROM claim_batch(p_cluster, p_requests::json);
END $$;

REVOKE ALL ON FUNCTION leasedjob.decide_claims, leasedjob.take_runs, leasedjob.claim_batch FROM PUBLIC;
