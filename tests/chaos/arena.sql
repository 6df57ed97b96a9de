-- What judges a run: a trigger that notes every write to a lease row, and a sink that checks fencing tokens.
CREATE SCHEMA chaos;

CREATE TABLE chaos.change (
    seq bigserial PRIMARY KEY, key text NOT NULL, code text NOT NULL, status text NOT NULL, token bigint NOT NULL,
    attempt integer NOT NULL, owner uuid NOT NULL, adopted boolean NOT NULL, modified_at timestamptz NOT NULL,
    lease_ms bigint NOT NULL
);
-- A row is written under its lock, so the numbers of one key have the order of the writes.
CREATE FUNCTION chaos.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.change (key, code, status, token, attempt, owner, adopted, modified_at, lease_ms)
    VALUES (NEW.lock_key, NEW.code, NEW.status, NEW.fencing_token, NEW.attempt, NEW.owner_token,
            NEW.pod_uid IS NOT NULL, NEW.modified_at, NEW.lease_ms);
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE ON leasedjob.job_scheduler FOR EACH ROW EXECUTE FUNCTION chaos.note();

CREATE TABLE chaos.sink (key text PRIMARY KEY, token bigint NOT NULL) WITH (fillfactor = 70);
CREATE TABLE chaos.effect (
    seq bigserial PRIMARY KEY, key text NOT NULL, token bigint NOT NULL, accepted boolean NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
-- An effect under a token: refused once a newer token was seen for this key.
CREATE FUNCTION chaos.act(p_key text, p_token bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_accepted boolean;
BEGIN
    INSERT INTO chaos.sink AS s (key, token) VALUES (p_key, p_token)
        ON CONFLICT (key) DO UPDATE SET token = excluded.token WHERE s.token <= excluded.token;
    v_accepted := FOUND;
    INSERT INTO chaos.effect (key, token, accepted) VALUES (p_key, p_token, v_accepted);
    RETURN v_accepted;
END $$;
