-- The witness within the database: a trigger that notes every write to a lease row, in the same transaction.
CREATE SCHEMA chaos;

CREATE TABLE chaos.change (
    seq bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(), key text NOT NULL, code text NOT NULL,
    run_key text, manual boolean NOT NULL, status text NOT NULL, outcome text, token bigint NOT NULL,
    attempt integer NOT NULL, owner uuid NOT NULL, adopted boolean NOT NULL, modified_at timestamptz NOT NULL,
    lease_ms bigint NOT NULL, retry boolean NOT NULL, reason text NOT NULL, cluster text NOT NULL
);
-- A row is written under its lock, so the numbers of one key have the order of the writes.
CREATE FUNCTION chaos.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.change (key, code, run_key, manual, status, outcome, token, attempt, owner, adopted, modified_at,
                              lease_ms, retry, reason, cluster)
    VALUES (NEW.lock_key, NEW.code, NEW.run_key, NEW.manual, NEW.status, NEW.outcome, NEW.fencing_token, NEW.attempt,
            NEW.owner_token, NEW.pod_uid IS NOT NULL, NEW.modified_at, NEW.lease_ms, NEW.retry_at IS NOT NULL, NEW.reason,
            NEW.cluster);
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE ON leasedjob.job_scheduler FOR EACH ROW EXECUTE FUNCTION chaos.note();
