-- Retention: old rows go, and what they stood for stays decided.
--
-- A run without a row could run again. So before rows of a code are deleted, its mark moves to the latest of their ticks:
-- a key at or below the mark that has no row is refused from then on. Only ended SCHEDULE runs whose key is a tick in UTC
-- are ever deleted: no mark could stand for an INITIAL run or for any other key.
--
--   1. mark_pruned moves the marks, and is committed.
--   2. Whoever prunes waits until each transaction that may have looked before that has ended.
--   3. delete_pruned deletes, some rows at a time.

CREATE TABLE leasedjob.pruned_through (
    code     text PRIMARY KEY,
    through  timestamptz NOT NULL,
    moved_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE leasedjob.pruned_through IS
    'Up to which tick, inclusive, a run of a code that has no row can''t be claimed any more.';

CREATE FUNCTION leasedjob.tick_of(p_run_key text) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN CASE
    WHEN p_run_key ~ ('^(?!0000)[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T'
                      '([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z(#r[1-9][0-9]{0,8})?$')
    THEN CASE
        WHEN substr(p_run_key, 9, 2)::integer <= extract(day FROM make_date(
                 substr(p_run_key, 1, 4)::integer, substr(p_run_key, 6, 2)::integer, 1) + interval '1 month -1 day')
        THEN timezone('UTC', make_timestamp(
                 substr(p_run_key, 1, 4)::integer, substr(p_run_key, 6, 2)::integer, substr(p_run_key, 9, 2)::integer,
                 substr(p_run_key, 12, 2)::integer, substr(p_run_key, 15, 2)::integer, substr(p_run_key, 18, 2)::integer))
    END
END;
COMMENT ON FUNCTION leasedjob.tick_of IS
    'The tick that a key like 2026-07-20T03:00:00Z (or ...Z#r1) names; NULL for any other key.';

CREATE FUNCTION leasedjob.is_pruned(p_code text, p_run_key text) RETURNS boolean
LANGUAGE sql STABLE
RETURN EXISTS (SELECT FROM leasedjob.pruned_through p
                WHERE p.code = p_code AND leasedjob.tick_of(p_run_key) <= p.through);

-- Every way into the table leads through here. (A plain query, not is_pruned: this runs for each row of a batch.)
CREATE FUNCTION leasedjob.refuse_pruned() RETURNS trigger
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM FROM leasedjob.pruned_through p
      WHERE p.code = NEW.code AND leasedjob.tick_of(NEW.run_key) <= p.through;
    RETURN CASE WHEN FOUND THEN NULL ELSE NEW END;
END $$;
CREATE TRIGGER job_scheduler_not_pruned BEFORE INSERT ON leasedjob.job_scheduler
    FOR EACH ROW WHEN (NEW.run_key IS NOT NULL) EXECUTE FUNCTION leasedjob.refuse_pruned();

-- As before, and "pruned": for a key without a row, and for a failure that is about to be deleted.
CREATE OR REPLACE FUNCTION leasedjob.acquire(
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

-- The one definition of what may be deleted. A failure with a retry left is no end, unless nobody counts its retries:
-- whoever acquired it without a LeasedJob. What the watermark has not passed may still be claimed.
CREATE FUNCTION leasedjob.is_prunable(p_row leasedjob.job_scheduler, p_before timestamptz, p_through timestamptz)
RETURNS boolean
LANGUAGE sql STABLE
RETURN (p_row).type = 'SCHEDULE'
   AND ((p_row).status = 'SUCCESS'
        OR ((p_row).status = 'FAIL' AND ((p_row).retry_at IS NULL OR (p_row).job_uid = '')))
   AND (p_row).finished_at < p_before
   AND leasedjob.tick_of((p_row).run_key) < p_before
   AND leasedjob.tick_of((p_row).run_key) <= p_through;

CREATE FUNCTION leasedjob.prunable(p_before timestamptz, p_keep integer)
RETURNS TABLE (code text, rows bigint, through timestamptz)
LANGUAGE sql STABLE SET search_path = leasedjob, pg_temp AS $$
    WITH newest AS (
        SELECT s.id, row_number() OVER (PARTITION BY s.code ORDER BY s.created_at DESC, s.id) AS place
          FROM job_scheduler s)
    SELECT s.code, count(*), max(tick_of(s.run_key))
      FROM job_scheduler s JOIN newest n ON n.id = s.id
      LEFT JOIN job_code c ON c.code = s.code
     WHERE n.place > p_keep AND is_prunable(s, p_before, coalesce(c.watermark, 'infinity'))
     GROUP BY s.code ORDER BY s.code
$$;
COMMENT ON FUNCTION leasedjob.prunable IS 'How many runs of each code ended before then, but for its newest ones.';

CREATE FUNCTION leasedjob.mark_pruned(p_before timestamptz, p_keep integer)
RETURNS TABLE (code text, rows bigint, through timestamptz, marked_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT * FROM prunable(p_before, p_keep)
    ), moved AS (
        INSERT INTO pruned_through AS p (code, through)
        SELECT d.code, d.through FROM due d ORDER BY d.code
            ON CONFLICT (code) DO UPDATE
           SET through = greatest(p.through, excluded.through), moved_at = clock_timestamp()
        RETURNING p.code, p.through)
    SELECT d.code, d.rows, m.through, clock_timestamp() FROM due d JOIN moved m ON m.code = d.code ORDER BY d.code;
END $$;

CREATE FUNCTION leasedjob.delete_pruned(
    p_code text, p_before timestamptz, p_keep integer, p_through timestamptz, p_limit integer
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM require_read_committed();
    -- The lock judges a row as it is when it is got: one that was reclaimed meanwhile stays.
    WITH due AS (
        SELECT s.id FROM job_scheduler s
         WHERE s.code = p_code AND s.created_at < p_before AND is_prunable(s, p_before, p_through)
           AND s.id NOT IN (SELECT k.id FROM job_scheduler k
                             WHERE k.code = p_code ORDER BY k.created_at DESC, k.id LIMIT p_keep)
         ORDER BY s.created_at LIMIT p_limit
           FOR UPDATE SKIP LOCKED)
    DELETE FROM job_scheduler s USING due d WHERE s.id = d.id;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

REVOKE ALL ON leasedjob.pruned_through FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA leasedjob FROM PUBLIC;
