-- Forgetting an object, not a code: where an object was deleted and another one has taken its place, a replica that has
-- only heard of the deletion must not end what the new object has started.

CREATE FUNCTION leasedjob.unregister_objects(p_cluster text, p_codes text[], p_uids text[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = leasedjob, pg_temp AS $$
DECLARE
    v_locked text[];
    v_other  text[];
BEGIN
    PERFORM require_read_committed();
    -- Registrations change under the code's lock only.
    v_locked := ARRAY(
        SELECT c.code FROM job_code c WHERE c.code = ANY (p_codes) ORDER BY c.code FOR NO KEY UPDATE SKIP LOCKED);
    v_other := ARRAY(
        SELECT o.code FROM unnest(p_codes, p_uids) o (code, uid)
          JOIN job_registration g ON g.code = o.code AND g.cluster = p_cluster AND g.uid <> o.uid
         WHERE o.code = ANY (v_locked));
    RETURN v_other || unregister_jobs(p_cluster, ARRAY(
        SELECT p.code FROM unnest(p_codes) p (code)
         WHERE p.code <> ALL (v_other)
           AND (p.code = ANY (v_locked) OR NOT EXISTS (SELECT FROM job_code c WHERE c.code = p.code))));
END $$;
COMMENT ON FUNCTION leasedjob.unregister_objects IS
    'As unregister_jobs, for codes that are registered with these uids; a code that has another object is done.';

REVOKE ALL ON FUNCTION leasedjob.unregister_objects FROM PUBLIC;
