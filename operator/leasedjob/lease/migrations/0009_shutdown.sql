-- How long the phases of a workload's stop took. Its own metric dies with the Pod, so the Pod's sidecar stores the figures
-- with the run, and one operator of the run's cluster exports them.
CREATE TABLE leasedjob.shutdown_report (
    run_id      uuid NOT NULL REFERENCES leasedjob.job_scheduler ON DELETE CASCADE,
    report      uuid NOT NULL,
    attempt     integer NOT NULL,
    cluster     text NOT NULL,
    phases      jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    exported_at timestamptz,
    PRIMARY KEY (run_id, report)
);
CREATE INDEX shutdown_report_new ON leasedjob.shutdown_report (cluster) WHERE exported_at IS NULL;
COMMENT ON TABLE leasedjob.shutdown_report IS
    'How an attempt''s programs stopped, one row for each program: [{"phase", "outcome", "seconds"}].';
COMMENT ON COLUMN leasedjob.shutdown_report.report IS 'Made by the sidecar, so that asking again changes nothing.';

-- The fourth function that a tenant's role may execute. It decides nothing, and takes no lock on the run.
CREATE FUNCTION leasedjob.report_shutdown(p_id uuid, p_token uuid, p_report uuid, p_phases jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_row job_scheduler;
BEGIN
    PERFORM require_read_committed();
    IF p_report IS NULL OR jsonb_typeof(p_phases) IS DISTINCT FROM 'array' OR octet_length(p_phases::text) > 2048 THEN
        RAISE EXCEPTION 'phases must be a JSON array of at most 2 KiB' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Also after the run's end: a program that has reported its outcome stops afterwards.
    SELECT * INTO v_row FROM job_scheduler s WHERE s.id = p_id AND s.owner_token = p_token AND may_touch(s.tenant);
    -- A Pod has a few programs; whoever sends more than that is not counted.
    IF NOT FOUND OR (SELECT count(*) FROM shutdown_report r
                      WHERE r.run_id = p_id AND r.attempt = v_row.attempt AND r.report <> p_report) >= 16 THEN
        RETURN false;
    END IF;
    INSERT INTO shutdown_report (run_id, report, attempt, cluster, phases)
    VALUES (p_id, p_report, v_row.attempt, v_row.cluster, p_phases)
        ON CONFLICT (run_id, report) DO NOTHING;
    RETURN true;
END $$;
COMMENT ON FUNCTION leasedjob.report_shutdown IS 'False: the lease is somebody else''s by now, or there are too many.';

-- Each report is given to one operator, once.
CREATE FUNCTION leasedjob.take_shutdown_reports(p_cluster text, p_limit integer) RETURNS SETOF jsonb
LANGUAGE sql VOLATILE SET search_path = leasedjob, pg_temp AS $$
    WITH due AS MATERIALIZED (
        SELECT n.run_id, n.report FROM shutdown_report n
         WHERE n.cluster = p_cluster AND n.exported_at IS NULL
         LIMIT p_limit FOR UPDATE SKIP LOCKED)
    UPDATE shutdown_report r SET exported_at = clock_timestamp()
      FROM due d WHERE r.run_id = d.run_id AND r.report = d.report
    RETURNING r.phases
$$;

REVOKE ALL ON leasedjob.shutdown_report FROM PUBLIC;
REVOKE ALL ON FUNCTION leasedjob.report_shutdown, leasedjob.take_shutdown_reports FROM PUBLIC;

-- Roles that exist already; later ones get it when they are made.
LOCK TABLE leasedjob.tenant IN SHARE ROW EXCLUSIVE MODE;
DO $$
DECLARE
    v_role name;
BEGIN
    FOR v_role IN SELECT t.role FROM leasedjob.tenant_role t JOIN pg_catalog.pg_roles r ON r.rolname = t.role LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION leasedjob.report_shutdown TO %I', v_role);
    END LOOP;
END $$;
