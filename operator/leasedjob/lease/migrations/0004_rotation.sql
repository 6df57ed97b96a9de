-- Which of a tenant's two slots its Secret names, since when, and when the other one's time is over. The database's clock
-- says so for all replicas; each change of it carries the state that it was decided on.

ALTER TABLE leasedjob.tenant
    ADD COLUMN slot       text NOT NULL DEFAULT 'a' CHECK (slot IN ('a', 'b')),
    ADD COLUMN slot_since timestamptz NOT NULL DEFAULT clock_timestamp(),
    ADD COLUMN retire_at  timestamptz,
    ADD COLUMN generation bigint NOT NULL DEFAULT 0;

COMMENT ON COLUMN leasedjob.tenant.slot IS 'The slot that new Pods use.';
COMMENT ON COLUMN leasedjob.tenant.slot_since IS 'Since when.';
COMMENT ON COLUMN leasedjob.tenant.retire_at IS
    'When every Pod has had time to see the new credential, and the other slot may be disabled; NULL: it is.';
COMMENT ON COLUMN leasedjob.tenant.generation IS
    'Grows with each password that is set and each change of slots: a decision made on an older one is refused.';
