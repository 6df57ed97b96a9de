"""What somebody with a namespace's database credential may try, and what comes of it: the one list, from which the
tests are made and docs/tenants.md is written (`python -m tests.integration.tenant_attacks`).

`shop` attacks. It has its own credential, token and claim, and for the sake of the argument it knows role, lease id and
tokens of another namespace, `bank`, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "tenants.md"


class Answer(StrEnum):
    """What PostgreSQL answers."""

    REFUSED = "refused"
    NO_EFFECT = "no effect"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True)
class Attack:
    """One attempt.

    Args:
        title: what it is, for the page.
        sql: statements in one session, in order; the last one is the attempt. Words in capitals stand for values.
        answer: what must come of it. After each attack, and while its session is still open, the other tenant holds its
            lease, beats and can log in, and the operator works.
        state: REFUSED: the SQLSTATE.
        gives: NO_EFFECT and POSSIBLE: the first row of the last answer, if it matters.
        remark: for the page: why, or what limits it.
        own: it may cost the attacker its own lease.
        test: instead of `sql`: the test that tries it.
    """

    title: str
    answer: Answer
    sql: tuple[str, ...] = ()
    state: str = ""
    gives: tuple[object, ...] | None = None
    remark: str = ""
    own: bool = False
    test: str = ""


def refused(title: str, *sql: str, state: str = "42501", remark: str = "") -> Attack:
    return Attack(title, Answer.REFUSED, sql, state, remark=remark)


def no_effect(title: str, *sql: str, gives: tuple[object, ...] | None = None, remark: str = "") -> Attack:
    return Attack(title, Answer.NO_EFFECT, sql, gives=gives, remark=remark)


def possible(title: str, *sql: str, remark: str, gives: tuple[object, ...] | None = None, own: bool = False) -> Attack:
    return Attack(title, Answer.POSSIBLE, sql, gives=gives, remark=remark, own=own)


def tested(title: str, answer: Answer, test: str, remark: str) -> Attack:
    return Attack(title, answer, test=test, remark=remark)


OTHERS_RUNS: Final = (
    no_effect(
        "adopt its claim, with the claim's token",
        "SELECT verdict FROM leasedjob.adopt('BANK_CLAIM', 'BANK_CLAIM_TOKEN', gen_random_uuid(), 'mine', 'mine')",
        gives=("refused",),
        remark="the login role isn't one of the run's namespace",
    ),
    no_effect(
        "adopt its running lease, with the owner's token",
        "SELECT verdict FROM leasedjob.adopt('BANK_ID', 'BANK_TOKEN', gen_random_uuid(), 'mine', 'mine')",
        gives=("refused",),
    ),
    no_effect(
        "extend its lease, with the owner's token",
        "SELECT held, busy FROM leasedjob.heartbeat('BANK_ID', 'BANK_TOKEN')",
        gives=(False, False),
    ),
    *(
        no_effect(
            f"record its outcome: {outcome}",
            f"SELECT leasedjob.finish('BANK_ID', 'BANK_TOKEN', '{outcome}', NULL)",
            gives=(False,),
        )
        for outcome in ("complete", "fail", "release")
    ),
    no_effect(
        "count durations of a shutdown as its",
        "SELECT leasedjob.report_shutdown('BANK_ID', 'BANK_TOKEN', gen_random_uuid(), '[]')",
        gives=(False,),
    ),
    no_effect(
        "guess a lease id",
        "SELECT verdict FROM leasedjob.adopt(gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'x', 'x')",
        gives=("lost",),
    ),
    no_effect(
        "take its own run with a wrong token",
        "SELECT verdict FROM leasedjob.adopt('OWN_ID', gen_random_uuid(), gen_random_uuid(), 'x', 'x')",
        gives=("taken",),
    ),
    no_effect(
        "keep a transaction open after calls on the other's lease",
        "BEGIN",
        "SELECT * FROM leasedjob.adopt('BANK_ID', 'BANK_TOKEN', gen_random_uuid(), 'x', 'x')",
        "SELECT leasedjob.finish('BANK_ID', 'BANK_TOKEN', 'fail', NULL)",
        "SELECT held FROM leasedjob.heartbeat('BANK_ID', 'BANK_TOKEN')",
        gives=(False,),
        remark="a row is locked only for its own namespace and the right token",
    ),
    refused(
        "judge by an old snapshot: another isolation level",
        "BEGIN ISOLATION LEVEL SERIALIZABLE",
        "SELECT * FROM leasedjob.heartbeat('OWN_ID', 'OWN_TOKEN')",
        state="0A000",
    ),
    *(
        no_effect(
            f"mislead the functions by settings: {setting}",
            f"SET {setting}",
            "SELECT held FROM leasedjob.heartbeat('BANK_ID', 'BANK_TOKEN')",
            gives=(False,),
        )
        for setting in ("timezone = 'Pacific/Kiritimati'", "transform_null_equals = on", "row_security = off")
    ),
    no_effect(
        "mislead the functions by temporary objects on the search path",
        "CREATE TEMP TABLE job_scheduler (id uuid, tenant text)",
        "CREATE TEMP TABLE tenant_role (role name, tenant text)",
        "INSERT INTO tenant_role VALUES (session_user, 'east/bank')",
        "CREATE FUNCTION pg_temp.may_touch(text) RETURNS boolean LANGUAGE sql RETURN true",
        "SET search_path = pg_temp, pg_catalog, leasedjob",
        "SELECT held FROM leasedjob.heartbeat('BANK_ID', 'BANK_TOKEN')",
        gives=(False,),
        remark="each function has a search path of its own, with pg_temp last",
    ),
)

TABLES: Final = (
    *(
        refused(f"read {what}", f"SELECT * FROM leasedjob.{table}")
        for what, table in (
            ("leases", "job_scheduler"),
            ("leases through the view", "run_summary"),
            ("codes", "job_code"),
            ("registrations", "job_registration"),
            ("what did not run", "tick_ledger"),
            ("tenants", "tenant"),
            ("tenants' roles", "tenant_role"),
            ("migrations", "schema_migration"),
        )
    ),
    refused("copy a table out", "COPY leasedjob.job_scheduler TO STDOUT"),
    refused("lock a row", "SELECT 1 FROM leasedjob.job_scheduler FOR UPDATE"),
    refused("lock a table", "BEGIN", "LOCK TABLE leasedjob.job_scheduler IN ACCESS EXCLUSIVE MODE"),
    refused("lock a table lightly", "BEGIN", "LOCK TABLE leasedjob.job_scheduler IN ACCESS SHARE MODE"),
    refused("lock the table under which roles are made", "BEGIN", "LOCK TABLE leasedjob.tenant IN SHARE MODE"),
    refused("change a lease", "UPDATE leasedjob.job_scheduler SET status = 'SUCCESS'"),
    refused("make a lease", "INSERT INTO leasedjob.job_scheduler (lock_key) VALUES ('x')"),
    refused("delete leases", "DELETE FROM leasedjob.job_scheduler"),
    refused("empty the table", "TRUNCATE leasedjob.job_scheduler"),
    refused("move a watermark", "UPDATE leasedjob.job_code SET watermark = now()"),
    refused(
        "speak for another tenant",
        "INSERT INTO leasedjob.tenant_role (role, tenant) VALUES (session_user, 'east/bank')",
    ),
    refused("take a fencing token", "SELECT nextval('leasedjob.fencing_token')"),
    refused("set the fencing token back", "SELECT setval('leasedjob.fencing_token', 1)"),
    refused("rebuild an index, which locks the table", "REINDEX TABLE leasedjob.job_scheduler"),
    refused("rewrite the table", "CLUSTER leasedjob.job_scheduler USING job_scheduler_pkey"),
    no_effect(
        "vacuum the table, which locks it", "VACUUM FULL leasedjob.job_scheduler", remark="skipped with a warning"
    ),
    refused("hang a trigger on it", "CREATE TRIGGER t BEFORE UPDATE ON leasedjob.job_scheduler EXECUTE FUNCTION f()"),
    refused(
        "point a foreign key at it", "CREATE TEMP TABLE t (id uuid REFERENCES leasedjob.job_scheduler)", state="42P16"
    ),
)

FUNCTIONS: Final = (
    *(
        refused(title, f"SELECT leasedjob.{call}")
        for title, call in (
            ("claim another's code", "claim_runs('east', '[]')"),
            ("acquire", "acquire('v2:x', 'SCHEDULE', 'bank/job', 'x', '', 1, gen_random_uuid(), '')"),
            ("register a job", "register_jobs('east', '[]')"),
            ("forget another's job", "unregister_jobs('east', '{bank/job}')"),
            ("forget another's object", "unregister_objects('east', '{bank/job}', '{x}')"),
            ("record ticks as decided", "record_ticks('east', 'bank/job', now(), '[]')"),
            ("renew claims", "renew_claims('east', '{}')"),
            ("give a claim back", "release_claim('BANK_CLAIM', 'BANK_CLAIM_TOKEN', '', 0)"),
            ("end an attempt", "end_attempt('BANK_ID', 1, 'bank-1', 'complete', false, NULL, '', NULL)"),
            ("end an attempt, the inner way", "close_attempt('BANK_ID', 'complete', false, NULL, '', NULL)"),
            ("stop a run", "request_stop('{BANK_ID}', '')"),
            ("stop a run, the inner way", "stop_runs('{BANK_ID}', '')"),
            ("write into the ledger", "write_ledger('east', 'bank/job', now(), '[]')"),
            ("ask who may", "may_touch('east/bank')"),
        )
    ),
    tested("call or read anything else of the schema", Answer.REFUSED, "test_whatever_else_a_migration_adds_is_refused",
           "also what a later version adds"),
)  # fmt: skip

OBJECTS: Final = (
    refused("make a table in the schema", "CREATE TABLE leasedjob.mine (x int)"),
    refused("make a function in the schema", "CREATE FUNCTION leasedjob.mine() RETURNS int LANGUAGE sql RETURN 1"),
    refused(
        "replace a function",
        "CREATE OR REPLACE FUNCTION leasedjob.may_touch(text) RETURNS bool LANGUAGE sql RETURN true",
    ),
    refused("change a function's search path", "ALTER FUNCTION leasedjob.heartbeat(uuid, uuid) RESET ALL"),
    refused("drop a function", "DROP FUNCTION leasedjob.heartbeat(uuid, uuid)"),
    no_effect("let everybody call a function", "GRANT EXECUTE ON FUNCTION leasedjob.heartbeat(uuid, uuid) TO PUBLIC",
              remark="PostgreSQL warns that nothing was granted"),
    refused("rename the schema", "ALTER SCHEMA leasedjob RENAME TO mine"),
    refused("drop the schema", "DROP SCHEMA leasedjob CASCADE"),
    refused("make a schema", "CREATE SCHEMA mine"),
    refused("make a table in public", "CREATE TABLE public.mine (x int)",
            remark="with PostgreSQL 15 and later, and databases made by them"),
    refused("make a function in public", "CREATE FUNCTION public.mine() RETURNS int LANGUAGE sql RETURN 1"),
    refused("an event trigger", "CREATE EVENT TRIGGER t ON ddl_command_start EXECUTE FUNCTION f()"),
    refused("a publication", "CREATE PUBLICATION p"),
    refused("a subscription", "CREATE SUBSCRIPTION s CONNECTION 'host=127.0.0.1' PUBLICATION p"),
    refused("a foreign server", "CREATE FOREIGN DATA WRAPPER w"),
    possible("temporary tables and functions", "CREATE TEMP TABLE mine AS SELECT generate_series(1, 1000)",
             remark="they take disk space until the session ends. `REVOKE TEMPORARY ON DATABASE … FROM PUBLIC` forbids "
             "it; set `temp_file_limit` for what queries spill"),
    possible("large objects", "SELECT lo_create(0)",
             remark="they take disk space for good. `REVOKE EXECUTE ON FUNCTION lo_create(oid), lo_creat(integer), "
             "lo_from_bytea(oid, bytea) FROM PUBLIC` (as superuser) forbids it"),
)  # fmt: skip

ROLES: Final = (
    refused("make a role", "CREATE ROLE mine"),
    refused("give itself rights", "ALTER ROLE CURRENT_USER CREATEROLE"),
    refused("lift its connection limit", "ALTER ROLE CURRENT_USER CONNECTION LIMIT 1000"),
    refused("let its password never expire", "ALTER ROLE CURRENT_USER VALID UNTIL 'infinity'"),
    refused("rename itself", "ALTER ROLE \"OWN_ROLE\" RENAME TO mine", state="0A000"),
    refused("drop itself", "DROP ROLE \"OWN_ROLE\"", remark="it isn't its own administrator"),
    refused("let itself act for everybody", "GRANT \"OWN_ROLE\" TO \"BANK_ROLE\""),
    refused("become the operator", "SET ROLE OWNER"),
    refused("pretend to be the operator", "SET SESSION AUTHORIZATION OWNER"),
    refused("join the operator", "GRANT OWNER TO CURRENT_USER"),
    refused("become the other tenant", "SET ROLE \"BANK_ROLE\""),
    refused("change the other tenant's password", "ALTER ROLE \"BANK_ROLE\" PASSWORD 'mine'"),
    refused("change the other tenant's settings", "ALTER ROLE \"BANK_ROLE\" SET search_path = x"),
    refused("drop the other tenant's role", "DROP ROLE \"BANK_ROLE\""),
    refused("drop what the other tenant owns", "DROP OWNED BY \"BANK_ROLE\""),
    no_effect("take the other tenant's rights away", "REVOKE USAGE ON SCHEMA leasedjob FROM \"BANK_ROLE\"",
              remark="PostgreSQL warns that nothing was revoked"),
    refused("use its own other slot", "SET ROLE \"OTHER_SLOT\"",
            remark="the role that its password is rotated to; it learns its password from the Secret, as intended"),
    refused("set the password of its own other slot", "ALTER ROLE \"OTHER_SLOT\" PASSWORD 'mine'"),
    refused("change another database's settings", "ALTER DATABASE postgres SET statement_timeout = '1ms'"),
    tested("log in with a rotated password", Answer.REFUSED, "test_a_rotated_password_opens_nothing",
           "its login is disabled and its sessions are ended when the overlap is over"),
    possible("change its own password", "ALTER ROLE CURRENT_USER PASSWORD NULL",
             remark="only its own runs can't be adopted then; the operator sets it again at the next one", own=True),
    possible("change its own defaults", "ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'serializable'",
             remark="only its own runs fail then; the operator resets them with the password", own=True),
)  # fmt: skip

SESSIONS: Final = (
    refused("end the other tenant's session", "SELECT pg_terminate_backend(BANK_PID)"),
    refused("cancel the other tenant's statement", "SELECT pg_cancel_backend(BANK_PID)"),
    refused("end the operator's session", "SELECT pg_terminate_backend(OPERATOR_PID)"),
    refused("cancel the operator's statement", "SELECT pg_cancel_backend(OPERATOR_PID)"),
    no_effect("read others' statements",
              "SELECT count(*) FROM pg_stat_activity WHERE usename <> session_user"
              " AND query NOT IN ('<insufficient privilege>', '')", gives=(0,)),
    no_effect("read where others come from",
              "SELECT count(*) FROM pg_stat_activity WHERE usename <> session_user AND client_addr IS NOT NULL",
              gives=(0,)),
    refused("read password hashes", "SELECT rolpassword FROM pg_authid"),
    no_effect("read settings that are for superusers", "SELECT count(*) FROM pg_settings WHERE name = 'data_directory'",
              gives=(0,)),
    no_effect("read statistics of the tables' contents",
              "SELECT count(*) FROM pg_stats WHERE schemaname = 'leasedjob'", gives=(0,)),
    possible("see that others exist", "SELECT count(*) > 0 FROM pg_roles WHERE rolname = 'BANK_ROLE'", gives=(True,),
             remark="roles are named by a hash of cluster and namespace; role names, session counts and the numbers of "
             "rows are visible to every role of a server"),
    possible("read the functions' source",
             "SELECT count(*) > 0 FROM pg_proc WHERE prosrc LIKE '%owner_token%'", gives=(True,),
             remark="it is public anyway"),
)  # fmt: skip

SERVER: Final = (
    refused("read a file", "SELECT pg_read_file('postgresql.conf')"),
    refused("list files", "SELECT pg_ls_dir('.')"),
    refused("copy from a file", "CREATE TEMP TABLE t (x text)", "COPY t FROM '/etc/passwd'"),
    refused("run a program", "COPY (SELECT 1) TO PROGRAM 'true'"),
    refused("import a file", "SELECT lo_import('/etc/passwd')"),
    refused("load a library", "LOAD '/tmp/mine.so'"),
    refused("change the server's settings", "ALTER SYSTEM SET max_connections = 1"),
    refused("reload the server", "SELECT pg_reload_conf()"),
    refused("make a replication slot", "SELECT pg_create_physical_replication_slot('mine')",
            remark="it would hold back the clean-up of the log"),
    refused("reset statistics", "SELECT pg_stat_reset()"),
    refused("skip triggers and constraints", "SET session_replication_role = replica"),
    refused("hide in the log", "SET log_statement = 'none'"),
    refused("prepare a transaction that outlives the session", "BEGIN",
            "SELECT * FROM leasedjob.heartbeat('OWN_ID', 'OWN_TOKEN')", "PREPARE TRANSACTION 'mine'", state="55000",
            remark="where `max_prepared_transactions` is 0, the default. Leave it so"),
    no_effect("hold every advisory lock that LeasedJob knows", f"SELECT pg_advisory_lock({0x1EA5ED10B})",
              remark="only the very first migration takes one"),
    no_effect("listen and notify", "LISTEN leasedjob", "NOTIFY leasedjob, 'claim'", remark="nobody listens"),
)  # fmt: skip

RESOURCES: Final = (
    tested("use up the server's connections", Answer.REFUSED, "test_the_connection_limit_is_the_tenants_own",
           "a role has 20"),
    tested("a statement that sleeps for ever, or a transaction that stays open", Answer.NO_EFFECT,
           "test_a_transaction_that_stays_open_is_ended",
           "timeouts of 30 s and 10 s are set for the role; a session can change them for itself, so the operator ends "
           "the session of any transaction that is older than a minute"),
    tested("keep its own row locked", Answer.NO_EFFECT,
           "test_an_open_transaction_of_a_tenant_does_not_hold_up_the_operator",
           "only its own run waits; nothing waits for a lock"),
    refused("store a huge result", "SELECT leasedjob.finish('OWN_ID', 'OWN_TOKEN', 'complete',"
            " to_jsonb(repeat('x', 300000)))", state="22023", remark="256 KiB are kept"),
    refused("store huge durations of a shutdown", "SELECT leasedjob.report_shutdown('OWN_ID', 'OWN_TOKEN',"
            " gen_random_uuid(), to_jsonb(array_fill(1, ARRAY[2000])))", state="22023",
            remark="2 KiB are kept, and 16 reports for each attempt"),
    no_effect("adopt with a huge name", "SELECT verdict FROM leasedjob.adopt('BANK_CLAIM', 'BANK_CLAIM_TOKEN',"
              " gen_random_uuid(), repeat('x', 10000000), repeat('x', 10000000))", gives=("refused",),
              remark="of its own run 128 and 253 characters are kept"),
    refused("build a value that is too large", "SELECT repeat('x', 1100000000)", state="54000"),
    possible("burn CPU and memory", "SET work_mem = '1GB'", "SELECT count(*) FROM generate_series(1, 1000)",
             remark="as any role that may log in can, for a minute at a time; a database of its own on a server of its "
             "own is the wall"),
    possible("write into the write-ahead log",
             "SELECT pg_logical_emit_message(true, 'x', repeat('x', 100000)) IS NOT NULL", gives=(True,),
             remark="revoking EXECUTE on `pg_logical_emit_message` from PUBLIC (as superuser) forbids it"),
)  # fmt: skip

ITS_OWN: Final = (
    possible("finish, fail or give back its own run",
             "SELECT leasedjob.finish('OWN_ID', 'OWN_TOKEN', 'release', NULL)", gives=(True,), own=True,
             remark="whoever has the namespace's Secret and a run's token decides what is recorded of it"),
    possible("invent durations of its own shutdown", "SELECT leasedjob.report_shutdown('OWN_ID', 'OWN_TOKEN',"
             " gen_random_uuid(), '[]')", gives=(True,), own=True,
             remark="a metric counts them, under labels that it can't choose"),
    possible("keep its own lease for ever", "SELECT held FROM leasedjob.heartbeat('OWN_ID', 'OWN_TOKEN')",
             gives=(True,), remark="until the run is cancelled, or `activeDeadlineSeconds` ends its Pod"),
)  # fmt: skip

GROUPS: Final = {
    "Another namespace's runs": OTHERS_RUNS,
    "Tables": TABLES,
    "The operator's functions": FUNCTIONS,
    "Objects of its own": OBJECTS,
    "Roles and passwords": ROLES,
    "Sessions and what can be seen": SESSIONS,
    "The server": SERVER,
    "Resources": RESOURCES,
    "Its own runs": ITS_OWN,
}

HEAD: Final = """\
# What a tenant can do

A *tenant* is one namespace of one cluster. Whoever may read Secrets there, or run a Pod there, has the credential of
its database role. This page lists what such a person may try, and what comes of it. Each row is a test against a real
PostgreSQL, and this page is written from the same list (`tests/integration/tenant_attacks.py`), so neither can drift.
After each attempt, and while its session is still open, another namespace holds its lease, sends its heartbeat and
logs in, and the operator works.

*Refused*: PostgreSQL answers with an error. *No effect*: there is an answer, but nothing of anybody else's changes, is
read or has to wait. *Possible*: it works, and the remark says what limits it, or how the owner of the database forbids
it.

Why roles, and which rights they have: [decisions/0002](decisions/0002-tenant-roles.md). How their passwords are
rotated: [decisions/0008](decisions/0008-rotation.md).

**For the owner of the database.** LeasedJob can't take from PUBLIC what PostgreSQL gives to every role that may log in.
Where namespaces are strangers to each other, give LeasedJob a database, or better a server, of its own, and as
superuser:

```sql
REVOKE CONNECT, TEMPORARY ON DATABASE leasedjob FROM PUBLIC;
GRANT CONNECT ON DATABASE leasedjob TO leasedjob WITH GRANT OPTION;  -- the operator's role
REVOKE EXECUTE ON FUNCTION lo_create(oid), lo_creat(integer), lo_from_bytea(oid, bytea) FROM PUBLIC;
ALTER SYSTEM SET temp_file_limit = '1GB';
```

With `sidecar.secret.create: false` the roles are yours; the operator then neither rotates them nor ends their sessions.
One shared role for several namespaces gives all of this away: any of them can change its password or end its sessions.
"""


def page() -> str:
    """The text of docs/tenants.md."""
    parts = [HEAD]
    for name, attacks in GROUPS.items():
        rows = "\n".join(f"| {a.title} | {a.answer} | {a.remark} |" for a in attacks)
        parts.append(f"## {name}\n\n| attempt | answer | |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}", file=sys.stderr)
