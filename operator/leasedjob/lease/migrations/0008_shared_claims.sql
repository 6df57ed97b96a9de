-- A batch of claims says once what its requests have in common: most of what a thousand of them say is the same, and
-- reading it took longer than the decision.
CREATE FUNCTION leasedjob.claim_batch(p_cluster text, p_requests json, p_shared json)
RETURNS SETOF leasedjob.claim_answer
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
    v_default := json_populate_record(v_default, p_shared);
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
COMMENT ON FUNCTION leasedjob.claim_batch(text, json, json) IS
    'p_shared: what a request leaves out. Where that lacks it too, type, backoff_limit, manual, reopen and dropped have a '
    'default.';

-- As operators of the previous version ask.
CREATE OR REPLACE FUNCTION leasedjob.claim_batch(p_cluster text, p_requests json) RETURNS SETOF leasedjob.claim_answer
LANGUAGE sql VOLATILE
BEGIN ATOMIC
SELECT * FROM leasedjob.claim_batch(p_cluster, p_requests, '{}');
END;

REVOKE ALL ON FUNCTION leasedjob.claim_batch(text, json, json) FROM PUBLIC;
