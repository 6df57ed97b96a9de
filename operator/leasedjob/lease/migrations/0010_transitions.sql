-- What becomes of runs, told once. A row says how a run stands, and every replica reads it; what is to be counted, or told to a
-- monitor, has to come to one of them, whoever wrote it: an operator, a sidecar, or nobody, where a lease ran out.
CREATE TABLE leasedjob.run_transition (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cluster      text NOT NULL,
    kind         text NOT NULL CHECK (kind IN ('started', 'ended', 'taken_over', 'given_up')),
    run_id       uuid NOT NULL,
    namespace    text NOT NULL,
    job_name     text NOT NULL,
    job_uid      text NOT NULL,
    run_key      text,
    tick         timestamptz,
    attempt      integer NOT NULL,
    outcome      text,
    counted      boolean NOT NULL,
    final        boolean NOT NULL,
    expired      boolean NOT NULL,
    adopted      boolean NOT NULL,
    from_cluster text NOT NULL,
    reason       text NOT NULL,
    happened_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_at     timestamptz
);
CREATE INDEX run_transition_new ON leasedjob.run_transition (cluster, id) WHERE taken_at IS NULL;
CREATE INDEX run_transition_started ON leasedjob.run_transition (run_id) WHERE kind = 'started';
COMMENT ON TABLE leasedjob.run_transition IS
    'Transitions of runs that a cluster holds, until one operator of it has taken them. Old ones are deleted.';
COMMENT ON COLUMN leasedjob.run_transition.kind IS
    'started: a Pod adopted the lease. ended: an attempt. taken_over: the next attempt found the lease expired. '
    'given_up: a run that waited for its next attempt gets none.';
COMMENT ON COLUMN leasedjob.run_transition.counted IS 'The end counts against the backoff limit.';
COMMENT ON COLUMN leasedjob.run_transition.final IS 'The run gets no further attempt.';
COMMENT ON COLUMN leasedjob.run_transition.expired IS 'The lease had run out by then.';
COMMENT ON COLUMN leasedjob.run_transition.adopted IS 'A Pod had adopted the lease.';

-- SECURITY DEFINER: whoever may change a row, its transition is written with the owner's rights.
CREATE FUNCTION leasedjob.note_transition() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_kind text := CASE
        WHEN OLD.status = 'RUNNING' AND NEW.status <> 'RUNNING' THEN 'ended'
        WHEN OLD.status = 'RUNNING' AND NEW.attempt > OLD.attempt THEN 'taken_over'
        WHEN OLD.status = 'RUNNING' AND OLD.pod_uid IS NULL AND NEW.pod_uid IS NOT NULL THEN 'started'
        WHEN OLD.status = 'FAIL' AND NEW.status = 'FAIL' AND OLD.retry_at IS NOT NULL AND NEW.retry_at IS NULL
            THEN 'given_up' END;
BEGIN
    IF v_kind IS NOT NULL THEN
        INSERT INTO run_transition (cluster, kind, run_id, namespace, job_name, job_uid, run_key, tick, attempt, outcome,
                                    counted, final, expired, adopted, from_cluster, reason)
        VALUES (NEW.cluster, v_kind, NEW.id, NEW.namespace, NEW.job_name, NEW.job_uid, NEW.run_key, NEW.tick, NEW.attempt,
                NEW.outcome, NEW.failures > OLD.failures,
                NEW.status = 'SUCCESS' OR (NEW.status = 'FAIL' AND NEW.retry_at IS NULL),
                OLD.status = 'RUNNING' AND is_expired(OLD.modified_at, OLD.lease_ms), OLD.pod_uid IS NOT NULL,
                OLD.cluster, left(NEW.reason, 1024));
    END IF;
    RETURN NULL;
END $$;

-- Of these columns a heartbeat sets none, so that it does not come here. Rows of the library alone belong to no cluster.
CREATE TRIGGER job_scheduler_transition
    AFTER UPDATE OF status, attempt, pod_uid, retry_at ON leasedjob.job_scheduler
    FOR EACH ROW WHEN (NEW.cluster <> '') EXECUTE FUNCTION leasedjob.note_transition();

-- Each transition is given to one operator, once; those of a run in their order. What follows a start waits until whoever
-- took the start has had p_apart to tell of it: two replicas must not tell of them the other way round.
CREATE FUNCTION leasedjob.take_transitions(p_cluster text, p_limit integer, p_apart interval)
RETURNS SETOF leasedjob.run_transition
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();
    DELETE FROM run_transition o
     WHERE o.id IN (SELECT d.id FROM run_transition d
                     WHERE d.taken_at < clock_timestamp() - interval '1 minute'
                        OR d.happened_at < clock_timestamp() - interval '1 day'
                     ORDER BY d.id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT n.id FROM run_transition n
         WHERE n.cluster = p_cluster AND n.taken_at IS NULL
           AND NOT EXISTS (SELECT FROM run_transition s
                            WHERE s.run_id = n.run_id AND s.kind = 'started' AND s.id < n.id
                              AND s.taken_at > clock_timestamp() - p_apart)
         ORDER BY n.id LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE run_transition t SET taken_at = clock_timestamp() FROM due d WHERE t.id = d.id RETURNING t.*
    )
    SELECT * FROM taken ORDER BY id;
END $$;

REVOKE ALL ON leasedjob.run_transition FROM PUBLIC;
REVOKE ALL ON FUNCTION leasedjob.note_transition, leasedjob.take_transitions FROM PUBLIC;
