-- The clusters that work on this database: whose name is whose, when their operators last asked, and which of them take no new
-- runs.
--
-- A name belongs to one cluster, which its UID tells from every other: Pods of runs are known by the name, so two clusters of
-- one name would each take the other's Pods for its own.

CREATE TABLE leasedjob.cluster (
    name          text PRIMARY KEY,
    uid           text NOT NULL DEFAULT '',
    release       text NOT NULL DEFAULT '',
    version       text NOT NULL DEFAULT '',
    first_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    by_values     boolean NOT NULL DEFAULT false,
    cordoned_at   timestamptz,
    cordoned_by   text NOT NULL DEFAULT '',
    cordon_reason text NOT NULL DEFAULT '',
    renamed_to    text
);
COMMENT ON TABLE leasedjob.cluster IS 'The clusters whose operators have worked on this database.';
COMMENT ON COLUMN leasedjob.cluster.uid IS
    'Of its namespace kube-system, or `namespace/` and that of the release''s; empty while no operator could tell.';
COMMENT ON COLUMN leasedjob.cluster.by_values IS 'Its release is installed with `cordoned: true`.';
COMMENT ON COLUMN leasedjob.cluster.cordoned_at IS 'Since when it takes no new runs because somebody asked for it.';
COMMENT ON COLUMN leasedjob.cluster.renamed_to IS 'What the same release of the same cluster is called by now.';
REVOKE ALL ON leasedjob.cluster FROM PUBLIC;

-- An operator says who it is, every few seconds, and is told whether the name is its own.
--   mine      yes
--   taken     another cluster, or another release of this one, works under the name
--   waits     the cluster's former name still has live runs: it takes no new ones, and its operators end those
--   succeeded this release has another name by now
-- p_new: the process has just started, so what it says is newer than what one says that has worked all along.
-- p_take_over: the UID of a cluster whose name is taken over however lately it was seen.
CREATE FUNCTION leasedjob.greet_cluster(
    p_name text, p_uid text, p_release text, p_version text, p_by_values boolean, p_new boolean, p_take_over text,
    OUT verdict text, OUT other text, OUT other_uid text, OUT other_release text, OUT seen_ago interval, OUT live bigint,
    OUT cordoned_at timestamptz, OUT cordoned_by text, OUT cordon_reason text
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_own   cluster;
    v_old   cluster;
    v_alive CONSTANT interval := '1 minute';     -- a release that was not seen for so long is not there
    v_lost  CONSTANT interval := '15 minutes';   -- a cluster that was not seen for so long has lost its name
BEGIN
    PERFORM require_read_committed();
    INSERT INTO cluster AS c (name, uid, release, version, by_values)
    SELECT p_name, p_uid, p_release, p_version, p_by_values
     WHERE NOT EXISTS (SELECT FROM cluster x WHERE x.name = p_name)
        ON CONFLICT (name) DO NOTHING;
    SELECT * INTO STRICT v_own FROM cluster c WHERE c.name = p_name FOR UPDATE;
    verdict := 'mine';
    live := 0;
    cordoned_at := v_own.cordoned_at;
    cordoned_by := v_own.cordoned_by;
    cordon_reason := v_own.cordon_reason;

    IF p_uid <> '' AND v_own.uid <> '' AND v_own.uid <> coalesce(p_take_over, '')
       AND clock_timestamp() - v_own.last_seen_at < (CASE
               WHEN v_own.uid <> p_uid THEN v_lost
               WHEN p_release <> '' AND v_own.release NOT IN ('', p_release) THEN v_alive
               ELSE '0' END) THEN
        verdict := 'taken';
        other := p_name;
        other_uid := v_own.uid;
        other_release := v_own.release;
        seen_ago := clock_timestamp() - v_own.last_seen_at;
        RETURN;
    END IF;

    IF v_own.renamed_to IS NOT NULL THEN
        SELECT * INTO v_old FROM cluster c WHERE c.name = v_own.renamed_to;
        IF FOUND AND NOT p_new AND clock_timestamp() - v_old.last_seen_at < v_alive THEN
            verdict := 'succeeded';
            other := v_old.name;
        ELSE
            UPDATE cluster c SET renamed_to = NULL WHERE c.name = p_name;
        END IF;
    END IF;

    IF v_own.uid <> p_uid OR v_own.release <> p_release OR v_own.version <> p_version OR v_own.by_values <> p_by_values
       OR v_own.last_seen_at < clock_timestamp() - interval '5 seconds' THEN
        UPDATE cluster c
           SET uid = coalesce(nullif(p_uid, ''), c.uid), release = coalesce(nullif(p_release, ''), c.release),
               version = p_version, by_values = p_by_values, last_seen_at = clock_timestamp()
         WHERE c.name = p_name;
    END IF;
    IF verdict <> 'mine' OR p_uid = '' OR p_release = '' THEN
        RETURN;
    END IF;

    -- This release had another name: what that name holds is brought to its end there, and then comes over.
    FOR v_old IN SELECT * FROM cluster c
                  WHERE c.uid = p_uid AND c.release = p_release AND c.name <> p_name
                  ORDER BY c.name FOR UPDATE LOOP
        IF v_old.renamed_to IS DISTINCT FROM p_name THEN
            UPDATE cluster c SET renamed_to = p_name WHERE c.name = v_old.name;
        END IF;
        SELECT count(*) INTO live FROM job_scheduler s
         WHERE s.cluster = v_old.name AND s.status = 'RUNNING' AND NOT is_expired(s.modified_at, s.lease_ms);
        IF live > 0 THEN
            verdict := 'waits';
            other := v_old.name;
            seen_ago := clock_timestamp() - v_old.last_seen_at;
            RETURN;
        END IF;
        UPDATE job_registration g SET cluster = p_name
         WHERE g.cluster = v_old.name
           AND NOT EXISTS (SELECT FROM job_registration x WHERE x.cluster = p_name AND x.code = g.code);
        DELETE FROM job_registration g WHERE g.cluster = v_old.name;
        UPDATE run_transition t SET cluster = p_name WHERE t.cluster = v_old.name AND t.taken_at IS NULL;
        UPDATE shutdown_report r SET cluster = p_name WHERE r.cluster = v_old.name AND r.exported_at IS NULL;
        IF v_old.cordoned_at IS NOT NULL AND v_own.cordoned_at IS NULL THEN
            UPDATE cluster c
               SET cordoned_at = v_old.cordoned_at, cordoned_by = v_old.cordoned_by, cordon_reason = v_old.cordon_reason
             WHERE c.name = p_name;
            UPDATE cluster c SET cordoned_at = NULL WHERE c.name = v_old.name;
            cordoned_at := v_old.cordoned_at;
            cordoned_by := v_old.cordoned_by;
            cordon_reason := v_old.cordon_reason;
        END IF;
        DELETE FROM cluster c WHERE c.name = v_old.name AND c.last_seen_at < clock_timestamp() - interval '1 hour';
    END LOOP;
END $$;

-- Cordons a cluster, or ends that. `known`: there is such a cluster; `changed`: by this call; `by_values`: its release's values
-- say so, whatever is asked for here. `clusters`: the names that there are.
CREATE FUNCTION leasedjob.cordon_cluster(
    p_name text, p_cordon boolean, p_reason text, p_audit jsonb,
    OUT known boolean, OUT changed boolean, OUT by_values boolean, OUT clusters text[]
)
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_own cluster;
BEGIN
    PERFORM require_read_committed();
    SELECT coalesce(array_agg(c.name ORDER BY c.name), '{}') INTO clusters FROM cluster c WHERE c.renamed_to IS NULL;
    SELECT * INTO v_own FROM cluster c WHERE c.name = p_name FOR UPDATE;
    known := FOUND;
    by_values := coalesce(v_own.by_values, false);
    changed := known AND (v_own.cordoned_at IS NOT NULL) <> p_cordon;
    IF changed THEN
        UPDATE cluster c
           SET cordoned_at = CASE WHEN p_cordon THEN clock_timestamp() END,
               cordoned_by = CASE WHEN p_cordon THEN coalesce(p_audit ->> 'asked_by', '') ELSE '' END,
               cordon_reason = CASE WHEN p_cordon THEN p_reason ELSE '' END
         WHERE c.name = p_name;
        INSERT INTO audit (cluster, code, run_key, attempt, action, did, asked_by, request, why)
        SELECT p_name, '', NULL, NULL, a.action, CASE WHEN p_cordon THEN 'Cordoned' ELSE 'Uncordoned' END, a.asked_by,
               a.request, coalesce(p_reason, '')
          FROM jsonb_to_record(p_audit) AS a (action text, asked_by text, request text)
            ON CONFLICT DO NOTHING;
    END IF;
END $$;

REVOKE ALL ON FUNCTION leasedjob.greet_cluster, leasedjob.cordon_cluster FROM PUBLIC;
