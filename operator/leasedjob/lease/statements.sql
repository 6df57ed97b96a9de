-- Every statement that LeasedJob sends, by name. Parameters are psycopg's; nothing is ever concatenated.
-- Functions are defined, with their rules, in migrations/.

-- name: register_jobs
-- Registers or refreshes LeasedJobs of one cluster.
SELECT * FROM leasedjob.register_jobs(%(cluster)s, %(jobs)s::jsonb);

-- name: unregister_objects
-- Forgets objects of one cluster, unless their codes have other objects by now; returns the codes that are done.
SELECT leasedjob.unregister_objects(%(cluster)s, %(codes)s::text[], %(uids)s::text[]) AS done;

-- name: claim_runs
-- Asks for a batch of runs. No answer at all where the cluster takes no new ones.
SELECT a.* FROM (SELECT %(cluster)s::text AS name
                  WHERE NOT EXISTS (SELECT FROM leasedjob.cluster c
                                     WHERE c.name = %(cluster)s
                                       AND (c.cordoned_at IS NOT NULL OR c.renamed_to IS NOT NULL))) open
 CROSS JOIN LATERAL leasedjob.claim_batch(open.name, %(requests)s::json, %(shared)s::json) a ORDER BY a.ordinal;

-- name: record_ticks
-- Records ticks that don't run, and moves the watermark.
SELECT * FROM leasedjob.record_ticks(%(cluster)s, %(code)s, %(through)s, %(ranges)s::jsonb, %(version)s);

-- name: record_suspended
-- Records ticks of a suspended object, unless another cluster is active with the code.
SELECT * FROM leasedjob.record_suspended(%(cluster)s, %(code)s, %(through)s, %(ranges)s::jsonb, %(version)s);

-- name: suspend_failing
-- Suspends a schedule whose last runs have failed.
SELECT * FROM leasedjob.suspend_failing(%(cluster)s, %(code)s, %(limit)s);

-- name: resume_code
-- Ends a suspension after failures.
SELECT * FROM leasedjob.resume_code(%(code)s, %(at)s, %(ranges)s::jsonb, %(version)s, %(audit)s::jsonb);

-- name: cancel_run
-- Ends a run for good, with an audit line.
SELECT leasedjob.cancel_run(%(id)s, %(reason)s, %(audit)s::jsonb) AS done;

-- name: release_run
-- Takes the lease away from an attempt, with an audit line; what was done.
SELECT leasedjob.release_run(%(id)s, %(attempt)s, %(force)s, %(audit)s::jsonb) AS did;

-- name: forget_run
-- Forgets that a run has failed, with an audit line.
SELECT leasedjob.forget_run(%(id)s, %(audit)s::jsonb) AS done;

-- name: write_audit
-- An audit line of its own, for what is done elsewhere than in the database.
SELECT leasedjob.write_audit(s.code, s.run_key, s.attempt, %(did)s, %(audit)s::jsonb)
  FROM leasedjob.job_scheduler s WHERE s.id = %(id)s;

-- name: audit
-- What was done to runs of a code because somebody asked for it, newest first.
SELECT a.at, a.cluster, a.code, a.run_key, a.attempt, a.action, a.did, a.asked_by, a.why
  FROM leasedjob.audit a WHERE a.code = %(code)s ORDER BY a.id DESC LIMIT %(limit)s;

-- name: begin_backfill
-- A backfill is planned; whoever plans it second changes nothing.
INSERT INTO leasedjob.backfill (uid, cluster, code, through, ticks, planned)
VALUES (%(uid)s, %(cluster)s, %(code)s, %(through)s, %(ticks)s, %(planned)s)
    ON CONFLICT DO NOTHING;

-- name: look_at_backfill
-- How far a backfill is.
SELECT * FROM leasedjob.look_at_backfill(%(uid)s);

-- name: step_backfill
-- A backfill goes on by one run, or past ticks that are left as they are. No answer where the cluster takes no new runs.
SELECT a.* FROM (SELECT %(cluster)s::text AS name
                  WHERE NOT EXISTS (SELECT FROM leasedjob.cluster c
                                     WHERE c.name = %(cluster)s
                                       AND (c.cordoned_at IS NOT NULL OR c.renamed_to IS NOT NULL))) open
 CROSS JOIN LATERAL leasedjob.step_backfill(open.name, %(uid)s, %(from)s, %(through)s, %(skipped)s, %(limit)s,
                                            %(request)s::json) a;

-- name: runs_by_key
-- The rows of these lock keys, as far as there are any.
SELECT s.* FROM leasedjob.run_summary s WHERE s.lock_key = ANY (%(lock_keys)s::text[]);

-- name: code_states
-- What is known of codes: how far their ticks are decided, what did not run, whether they are suspended after failures.
SELECT c.code, c.watermark, c.created_at, c.ledger_through, c.suspended_at, c.suspended_by, c.suspended_runs,
       c.suspended_reason, p.through AS pruned_through, g.uid AS registered_uid, g.suspended AS registered_suspended,
       g.schedule_hash AS registered_schedule, clock_timestamp() AS db_now,
       EXISTS (SELECT FROM leasedjob.job_registration o
                WHERE o.code = c.code AND o.cluster <> %(cluster)s AND NOT o.suspended) AS active_elsewhere,
       (SELECT jsonb_object_agg(n.kind, n.count) FROM leasedjob.tick_count n WHERE n.code = c.code) AS counts,
       (SELECT jsonb_agg(to_jsonb(l) ORDER BY l.first DESC)
          FROM (SELECT * FROM leasedjob.tick_ledger t WHERE t.code = c.code
                 ORDER BY t.first DESC, t.kind LIMIT %(limit)s) l) AS ledger,
       c.schedules_version AS version,
       (SELECT jsonb_agg(to_jsonb(s) ORDER BY s.since, s.id) FROM leasedjob.code_schedule s
         WHERE s.code = c.code AND (s.until IS NULL OR s.until > c.watermark)) AS schedules
  FROM leasedjob.job_code c
  LEFT JOIN leasedjob.pruned_through p ON p.code = c.code
  LEFT JOIN leasedjob.job_registration g ON g.code = c.code AND g.cluster = %(cluster)s
 WHERE c.code = ANY (%(codes)s::text[]);

-- name: codes_with_news
-- Registered codes whose ledger, suspension or, as other clusters have them too, schedules have changed since, and when.
SELECT n.code, max(n.at) AS at
  FROM (SELECT l.code, l.decided_at AS at FROM leasedjob.tick_ledger l WHERE l.decided_at >= %(since)s
        UNION ALL
        SELECT c.code, c.suspension_changed_at FROM leasedjob.job_code c WHERE c.suspension_changed_at >= %(since)s
        UNION ALL
        SELECT s.code, s.changed_at FROM leasedjob.code_schedule s
         WHERE s.changed_at >= %(since)s
           AND EXISTS (SELECT FROM leasedjob.job_registration o WHERE o.code = s.code AND o.cluster <> %(cluster)s)) n
 WHERE EXISTS (SELECT FROM leasedjob.job_registration g WHERE g.code = n.code AND g.cluster = %(cluster)s)
 GROUP BY n.code;

-- name: ledger_at
-- The range of the ledger that an instant is in.
SELECT l.*
  FROM (SELECT * FROM leasedjob.tick_ledger t
         WHERE t.code = %(code)s AND t.first <= %(at)s ORDER BY t.first DESC, t.kind LIMIT 1) l
 WHERE l.last >= %(at)s;

-- name: schedules_at
-- The schedules of a code that were in force at an instant.
SELECT s.code, s.schedule_hash, s.schedule, s.since, s.until
  FROM leasedjob.code_schedule s
 WHERE s.code = %(code)s AND s.since < %(at)s AND (s.until IS NULL OR s.until >= %(at)s)
 ORDER BY s.since, s.id;

-- name: prune_ledger
-- Deletes some old ranges of the ledger, audit lines and backfills.
SELECT leasedjob.prune_ledger(clock_timestamp() - %(age)s, %(limit)s) AS gone;

-- name: prunable_ledger
-- How many ranges of the ledger would go.
SELECT count(*) AS gone
  FROM leasedjob.tick_ledger l JOIN leasedjob.job_code c ON c.code = l.code AND l.last <= c.watermark
 WHERE l.last < clock_timestamp() - %(age)s;

-- name: renew_claims
-- Extends unadopted claims of one cluster.
SELECT leasedjob.renew_claims(%(cluster)s, %(ids)s::uuid[]) AS renewed;

-- name: release_claim
-- Gives an unadopted claim back.
SELECT leasedjob.release_claim(%(id)s, %(token)s, %(reason)s, %(retry_ms)s) AS changed;

-- name: end_attempt
-- Records how an attempt ended, as the operator saw it.
SELECT leasedjob.end_attempt(%(id)s, %(attempt)s, %(pod_uid)s, %(outcome)s, %(counts)s, %(retry_ms)s, %(reason)s,
                             %(data)s::jsonb) AS changed;

-- name: request_stop
-- Ends runs for good; returns the ids that are stopping or have ended.
SELECT leasedjob.request_stop(%(ids)s::uuid[], %(reason)s) AS done;

-- name: active_rows
-- Every run of a registered code that is RUNNING or has a retry left.
SELECT s.*
  FROM leasedjob.job_registration g JOIN leasedjob.run_summary s ON s.code = g.code
 WHERE g.cluster = %(cluster)s AND (s.status = 'RUNNING' OR s.retry_at IS NOT NULL)
 ORDER BY s.code, s.created_at, s.id;

-- name: changed_since
-- Runs of registered codes that changed, oldest change first. No limit: whoever asks with an overlap would never get
-- past a page that lies within it.
SELECT s.*
  FROM leasedjob.run_summary s
 WHERE s.changed_at >= %(since)s
   AND EXISTS (SELECT FROM leasedjob.job_registration g WHERE g.code = s.code AND g.cluster = %(cluster)s)
 ORDER BY s.changed_at, s.id;

-- name: recent_runs
-- The last runs of each code, newest first.
SELECT s.*
  FROM unnest(%(codes)s::text[]) c (code)
 CROSS JOIN LATERAL (SELECT * FROM leasedjob.run_summary r
                      WHERE r.code = c.code ORDER BY r.created_at DESC, r.id LIMIT %(limit)s) s
 ORDER BY s.code, s.created_at DESC, s.id;

-- name: runs_by_id
-- These rows.
SELECT s.*, clock_timestamp() AS db_now FROM leasedjob.job_scheduler s WHERE s.id = ANY (%(ids)s::uuid[]);

-- name: ledger
-- What did not run, newest first.
SELECT * FROM leasedjob.tick_ledger l WHERE l.code = %(code)s ORDER BY l.first DESC, l.kind LIMIT %(limit)s;

-- name: database_now
-- The database's clock.
SELECT clock_timestamp() AS now;

-- name: registrations
-- Which codes this cluster has registered, for which namespace and object.
SELECT g.code, g.namespace, g.uid
  FROM leasedjob.job_registration g
 WHERE g.cluster = %(cluster)s;

-- name: held_leases
-- Leases that are held, in all clusters, those that end first; and how many there are.
SELECT s.*, count(*) OVER () AS total
  FROM leasedjob.run_summary s
 WHERE s.status = 'RUNNING'
 ORDER BY leasedjob.expires_at(s.modified_at, s.lease_ms), s.id
 LIMIT %(limit)s;

-- name: runs_since
-- Runs that have changed since, in all clusters, the latest first.
SELECT s.*
  FROM leasedjob.run_summary s
 WHERE s.changed_at >= %(since)s
 ORDER BY s.changed_at DESC, s.id
 LIMIT %(limit)s;

-- name: greet_cluster
-- An operator says who it is, and is told whether its name is its own and whether it is cordoned.
SELECT * FROM leasedjob.greet_cluster(%(cluster)s, %(uid)s, %(release)s, %(version)s, %(by_values)s, %(new)s, %(take_over)s);

-- name: cordon_cluster
-- A cluster takes no new runs, or takes them again.
SELECT * FROM leasedjob.cordon_cluster(%(cluster)s, %(cordon)s, %(reason)s, %(audit)s::jsonb);

-- name: forget_cluster
-- A cluster that is gone for good counts no more.
SELECT * FROM leasedjob.forget_cluster(%(cluster)s, %(silence)s, %(reason)s, %(audit)s::jsonb);

-- name: known_clusters
-- The clusters that have worked on this database, and how much each has.
SELECT n.name, coalesce(c.uid, '') AS uid, coalesce(c.release, '') AS release, coalesce(c.version, '') AS version,
       c.first_seen_at, c.last_seen_at, coalesce(c.by_values, false) AS by_values, c.cordoned_at,
       coalesce(c.cordoned_by, '') AS cordoned_by, coalesce(c.cordon_reason, '') AS cordon_reason,
       held.runs, (SELECT count(*) FROM leasedjob.job_registration g WHERE g.cluster = n.name) AS jobs,
       clock_timestamp() AS db_now
  FROM (SELECT name FROM leasedjob.cluster UNION SELECT cluster FROM leasedjob.job_registration) n
  LEFT JOIN leasedjob.cluster c USING (name)
 CROSS JOIN LATERAL (SELECT count(*) AS runs FROM leasedjob.job_scheduler s
                      WHERE s.cluster = n.name AND s.status = 'RUNNING'
                        AND NOT leasedjob.is_expired(s.modified_at, s.lease_ms)) held
 WHERE c.renamed_to IS NULL OR held.runs > 0
 ORDER BY n.name;

-- name: registered_by
-- Which clusters have registered a code, and from which object.
SELECT g.cluster, g.namespace, g.name, g.policy, g.suspended
  FROM leasedjob.job_registration g WHERE g.code = %(code)s ORDER BY g.cluster;

-- name: adopt
-- A Pod takes a claim over.
SELECT * FROM leasedjob.adopt(%(id)s, %(claim_token)s, %(new_token)s, %(pod_uid)s, %(pod_name)s);

-- name: heartbeat
-- The holder extends its lease.
SELECT * FROM leasedjob.heartbeat(%(id)s, %(token)s);

-- name: finish
-- The holder records its outcome.
SELECT leasedjob.finish(%(id)s, %(token)s, %(outcome)s, %(data)s::jsonb) AS recorded;

-- name: report_shutdown
-- How a program of the Pod has stopped.
SELECT leasedjob.report_shutdown(%(id)s, %(token)s, %(report)s, %(phases)s::jsonb) AS taken;

-- name: take_shutdown_reports
-- Some that no operator of this cluster has exported.
SELECT phases FROM leasedjob.take_shutdown_reports(%(cluster)s, %(limit)s) AS taken (phases);

-- name: take_transitions
-- Transitions of runs that no operator of this cluster has taken.
SELECT * FROM leasedjob.take_transitions(%(cluster)s, %(limit)s, %(apart)s);

-- name: schema_exists
-- What of the schema is there. It reads the catalogue's rows: to_regclass() may answer from a cache that is older than
-- the lock under which this is asked.
SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = 'leasedjob') AS schema,
       EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = 'leasedjob' AND c.relname = 'schema_migration') AS migrations;

-- name: applied_migrations
-- The migrations that this database has.
SELECT version, name, checksum FROM leasedjob.schema_migration ORDER BY version;

-- name: record_migration
-- Remembers a migration, in the transaction that applied it.
INSERT INTO leasedjob.schema_migration (version, name, checksum) VALUES (%(version)s, %(name)s, %(checksum)s);

-- name: remember_tenant
-- Also the lock under which a tenant's roles are changed.
INSERT INTO leasedjob.tenant (tenant) VALUES (%(tenant)s)
    ON CONFLICT (tenant) DO UPDATE SET tenant = excluded.tenant;

-- name: remember_tenant_role
-- A login role may speak for a tenant.
INSERT INTO leasedjob.tenant_role (role, tenant) VALUES (%(role)s, %(tenant)s)
    ON CONFLICT (role) DO UPDATE SET tenant = excluded.tenant;

-- name: forget_tenant_role
-- A login role speaks for nobody any more.
DELETE FROM leasedjob.tenant_role WHERE role = %(role)s;

-- name: tenant_state
-- Which slot a tenant uses, for how long already, and which of its roles may speak for it.
SELECT t.slot, t.generation, clock_timestamp() - t.slot_since AS age, t.retire_at IS NOT NULL AS overlapping,
       coalesce(t.retire_at <= clock_timestamp(), false) AS retirable,
       ARRAY(SELECT r.role::text FROM leasedjob.tenant_role r WHERE r.tenant = t.tenant ORDER BY r.role) AS roles
  FROM leasedjob.tenant t
 WHERE t.tenant = %(tenant)s;

-- name: switch_slot
-- A tenant's Secret names the other slot: from now on it is the current one, and the former one's time is limited.
UPDATE leasedjob.tenant t
   SET slot = %(slot)s, slot_since = clock_timestamp(), generation = t.generation + 1,
       retire_at = clock_timestamp() + %(overlap_ms)s * interval '1 millisecond'
 WHERE t.tenant = %(tenant)s AND t.slot <> %(slot)s AND t.generation = %(generation)s
RETURNING t.slot;

-- name: slot_retired
-- The slot that isn't current can't log in any more and has no session left.
UPDATE leasedjob.tenant t SET retire_at = NULL, generation = t.generation + 1 WHERE t.tenant = %(tenant)s;

-- name: next_generation
-- What was decided on this tenant's state until now is to be decided anew; nothing if that has happened meanwhile.
UPDATE leasedjob.tenant t SET generation = t.generation + 1
 WHERE t.tenant = %(tenant)s AND t.generation = %(generation)s
RETURNING t.generation;

-- name: tenants_with_news
-- Tenants of a cluster whose credential is old, or whose former slot's time is over; in any order, so that several
-- replicas don't all begin with the same one. Where nothing runs and nobody has a LeasedJob, an old credential is of
-- interest as long as it works.
SELECT t.tenant
  FROM leasedjob.tenant t
 WHERE starts_with(t.tenant, %(cluster)s || '/')
   AND (t.retire_at <= clock_timestamp()
        OR (t.retire_at IS NULL AND %(rotate_after_ms)s > 0
            AND t.slot_since <= clock_timestamp() - %(rotate_after_ms)s * interval '1 millisecond'
            AND (t.tenant = ANY (%(in_use)s::text[])
                 OR (EXISTS (SELECT FROM leasedjob.tenant_role r WHERE r.tenant = t.tenant)
                     AND NOT EXISTS (SELECT FROM leasedjob.job_scheduler s
                                      WHERE s.tenant = t.tenant AND s.status = 'RUNNING')))))
 ORDER BY random()
 LIMIT %(limit)s;

-- name: end_sessions
-- Tells the sessions of a role to end; how many were told.
SELECT count(*) FILTER (WHERE pg_terminate_backend(a.pid)) AS told
  FROM pg_catalog.pg_stat_activity a WHERE a.usename = %(role)s;

-- name: end_overdue_sessions
-- Ends sessions of tenants whose transaction has been open for too long: it would hold back the clean-up of every table,
-- and a role can change its own timeouts. Only members of a role see since when, and may end it.
SELECT a.usename::text AS role, pg_terminate_backend(a.pid) AS told
  FROM pg_catalog.pg_stat_activity a JOIN leasedjob.tenant_role r ON r.role = a.usename
 WHERE pg_has_role(current_user, a.usesysid, 'USAGE')
   AND a.xact_start < clock_timestamp() - %(longest_ms)s * interval '1 millisecond';

-- name: sessions_of
-- How many sessions a role has, in whatever database.
SELECT count(*) AS sessions FROM pg_catalog.pg_stat_activity a WHERE a.usename = %(role)s;

-- name: role_state
-- Whether a role exists, and whether it can connect to this database already.
SELECT r.oid IS NOT NULL AS present,
       coalesce(has_database_privilege(r.oid, current_database(), 'CONNECT'), false) AS may_connect
  FROM (SELECT 1) one LEFT JOIN pg_catalog.pg_roles r ON r.rolname = %(role)s;

-- name: tenant_roles
-- Which roles a tenant has.
SELECT role::text AS role FROM leasedjob.tenant_role WHERE tenant = %(tenant)s ORDER BY role;

-- name: current_database
-- The database's own name, which a pooler may have renamed for its clients.
SELECT current_database() AS name;

-- name: acquire
-- A library's caller takes a run, if it can be taken.
SELECT a.verdict, (a.job).id, (a.job).lock_key, (a.job).type, (a.job).code, (a.job).run_key, (a.job).name,
       (a.job).status, (a.job).owner_token, (a.job).attempt, (a.job).fencing_token, (a.job).lease_ms, (a.job).holder,
       (a.job).data, (a.job).created_at, (a.job).started_at, (a.job).finished_at, (a.job).modified_at
  FROM leasedjob.acquire(%(lock_key)s, %(type)s::leasedjob.job_scheduler_type, %(code)s, %(run_key)s, %(name)s,
                         %(lease_ms)s, %(token)s, %(holder)s) a;

-- name: after_restore
-- The database was restored to an earlier point.
SELECT * FROM leasedjob.after_restore(%(as_of)s::timestamptz, %(longest_ms)s, %(tokens)s, %(token_above)s,
                                      %(attempts)s, %(dry_run)s);

-- name: after_move
-- The database is on another server now; which roles are missing there.
SELECT leasedjob.after_move() AS roles;

-- name: operator_sessions
-- Sessions of operators on this database, as far as this role sees them.
SELECT a.pid, a.application_name FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = current_database() AND a.application_name LIKE 'leasedjob-operator%%';

-- name: prunable
-- How many ended runs of each code could be deleted.
SELECT code, rows, through FROM leasedjob.prunable(clock_timestamp() - %(age)s, %(keep)s);

-- name: mark_pruned
-- Moves the marks below which runs without a row can't be claimed.
SELECT code, rows, through, marked_at FROM leasedjob.mark_pruned(clock_timestamp() - %(age)s, %(keep)s);

-- name: open_since
-- How many transactions began before that instant and have not ended, as far as this role can see.
SELECT count(*) AS transactions
  FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.xact_start < %(marked_at)s
   AND a.backend_type = 'client backend';

-- name: delete_pruned
-- Deletes some rows at or below a mark.
SELECT leasedjob.delete_pruned(%(code)s, clock_timestamp() - %(age)s, %(keep)s, %(through)s, %(limit)s) AS gone;

-- name: pruned_keys
-- Which of these keys are at or below their code's mark, and have no row that still counts.
SELECT k.lock_key, clock_timestamp() AS db_now
  FROM unnest(%(codes)s::text[], %(run_keys)s::text[], %(lock_keys)s::text[]) k (code, run_key, lock_key)
 WHERE leasedjob.is_pruned(k.code, k.run_key)
   AND NOT EXISTS (SELECT FROM leasedjob.job_scheduler s WHERE s.lock_key = k.lock_key AND s.status <> 'FAIL');
