-- The lease without an operator: acquire, as a library's caller uses it. Heartbeat and finish are those of 0001.

CREATE FUNCTION leasedjob.acquire(
    p_lock_key text, p_type leasedjob.job_scheduler_type, p_code text, p_run_key text, p_name text, p_lease_ms bigint,
    p_token uuid, p_holder text, OUT verdict text, OUT job leasedjob.job_scheduler
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
BEGIN
    PERFORM require_read_committed();

    INSERT INTO job_scheduler AS s (lock_key, type, code, run_key, name, lease_ms, run_lease_ms, owner_token, holder)
    VALUES (p_lock_key, p_type, p_code, p_run_key, p_name, p_lease_ms, p_lease_ms, p_token, p_holder)
        ON CONFLICT (lock_key) DO NOTHING
    RETURNING s.* INTO job;
    IF FOUND THEN
        verdict := 'acquired';
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
           SET status = 'RUNNING', outcome = NULL, owner_token = p_token, attempt = s.attempt + 1,
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
COMMENT ON FUNCTION leasedjob.acquire IS
    'A fresh insert, or a reclaim of FAIL or of an expired RUNNING row; SUCCESS stays. p_token is proposed by the caller, '
    'so that asking again after a lost answer finds its own row.';

REVOKE ALL ON FUNCTION leasedjob.acquire FROM PUBLIC;
