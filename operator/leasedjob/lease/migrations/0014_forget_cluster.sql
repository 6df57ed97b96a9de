-- A cluster that is gone for good: its registrations go with its name, so that its schedules and its policy count no more.

-- `known`: there is such a cluster. `forgotten`: by this call. Else `seen_ago` or `live` say why not, or `busy`: rows of it are
-- locked, ask again. `jobs`: its registrations. `clusters`: the names that there are.
-- p_silence: for how long it must not have been seen.
CREATE FUNCTION leasedjob.forget_cluster(
    p_name text, p_silence interval, p_why text, p_audit jsonb,
    OUT known boolean, OUT forgotten boolean, OUT busy boolean, OUT seen_ago interval, OUT live bigint, OUT jobs bigint,
    OUT clusters text[]
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_codes text[];
BEGIN
    PERFORM require_read_committed();
    forgotten := false;
    busy := false;
    SELECT coalesce(array_agg(n.name ORDER BY n.name), '{}') INTO clusters
      FROM (SELECT c.name FROM cluster c UNION SELECT g.cluster FROM job_registration g) n;
    known := p_name = ANY (clusters);
    -- Its operators wait here, should they be back at this very moment, and then begin anew.
    SELECT clock_timestamp() - c.last_seen_at INTO seen_ago FROM cluster c WHERE c.name = p_name FOR UPDATE;
    SELECT count(*) INTO live FROM job_scheduler s
     WHERE s.cluster = p_name AND s.status = 'RUNNING' AND NOT is_expired(s.modified_at, s.lease_ms);
    v_codes := ARRAY(SELECT g.code FROM job_registration g WHERE g.cluster = p_name ORDER BY g.code);
    jobs := cardinality(v_codes);
    IF NOT known OR seen_ago < p_silence OR live > 0 THEN
        RETURN;
    END IF;
    -- As if its objects had been deleted: retries are given up where no other cluster has the code.
    busy := cardinality(unregister_jobs(p_name, v_codes)) < jobs;
    IF busy THEN
        RETURN;
    END IF;
    DELETE FROM cluster c WHERE c.name = p_name;
    forgotten := true;
    INSERT INTO audit (cluster, code, run_key, attempt, action, did, asked_by, request, why)
    SELECT p_name, '', NULL, NULL, a.action, 'Forgotten', a.asked_by, a.request, coalesce(p_why, '')
      FROM jsonb_to_record(p_audit) AS a (action text, asked_by text, request text)
        ON CONFLICT DO NOTHING;
END $$;

REVOKE ALL ON FUNCTION leasedjob.forget_cluster FROM PUBLIC;
