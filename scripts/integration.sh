#!/usr/bin/env bash
# Runs the tests that need a PostgreSQL or an API server without nodes; brings PgBouncer, PostgreSQL 15, Redis, Kafka and
# Chromium.
set -euo pipefail
: "${BIN:?}" "${WORKERS:?}"
cd "$(dirname "$0")/.."
. scripts/suite.sh

tools=$(mktemp -d -t leasedjob-tools-XXXXXX)
trap 'rm -rf "$tools"' EXIT
chmod 755 "$tools"

# bring VERB VARIABLE WHAT [FOLDER]: gets a program (into FOLDER, if it is to be unpacked there) and exports where it is;
# without it, says what will be skipped.
bring() {
    local found
    [ -z "${4:-}" ] || mkdir "$4"
    if found=$("$BIN/python" -m tests.cluster "$1" ${4:+"$4"} | tail -n 1) && [ -n "$found" ]; then
        export "$2=$found"
    elif [ "${CI:-}" = true ]; then
        exit 1
    else
        echo "$3" >&2
    fi
}
if [ -z "${LEASEDJOB_TEST_PGBOUNCER:-}" ] && ! command -v pgbouncer > /dev/null; then
    unset LEASEDJOB_TEST_PGBOUNCER
    bring pgbouncer LEASEDJOB_TEST_PGBOUNCER "THE TESTS BEHIND PGBOUNCER WILL BE SKIPPED" "$tools/pgbouncer"
fi
if [ -z "${LEASEDJOB_TEST_POSTGRES15_BIN:-}" ] && [ ! -x /usr/lib/postgresql/15/bin/postgres ]; then
    unset LEASEDJOB_TEST_POSTGRES15_BIN
    bring postgresql15 LEASEDJOB_TEST_POSTGRES15_BIN "THE TESTS ON POSTGRESQL 15 WILL BE SKIPPED" "$tools/postgresql15"
fi
if [ -z "${LEASEDJOB_TEST_REDIS:-}" ] && ! command -v redis-server > /dev/null; then
    unset LEASEDJOB_TEST_REDIS
    bring redis LEASEDJOB_TEST_REDIS "THE TESTS ON REDIS WILL BE SKIPPED" "$tools/redis"
fi
if [ -z "${LEASEDJOB_TEST_KAFKA:-}" ]; then
    unset LEASEDJOB_TEST_KAFKA
    bring kafka LEASEDJOB_TEST_KAFKA "THE TESTS ON KAFKA WILL BE SKIPPED"
fi
if [ -z "${LEASEDJOB_TEST_CHROMIUM:-}" ]; then
    unset LEASEDJOB_TEST_CHROMIUM
    bring chromium LEASEDJOB_TEST_CHROMIUM "THE TESTS OF THE STATUS PAGE IN CHROMIUM WILL BE SKIPPED"
fi
# Not within a test, whose time is limited.
"$BIN/python" -m tests.cluster build etcd kube
if [ -n "${SOAK:-}" ]; then # `make soak`: the long variants of everything but the cluster's, one after the other
    suite tests --ignore tests/e2e -m soak --timeout 3600 -rP
    exit "$code"
fi
# A test here waits for real processes on a machine that may be busy with others: one that fails is tried twice more, which
# the output counts as "rerun". What fails three times is broken. The longest come first, and whoever is free takes the next.
suite tests/controller tests/integration --reruns 2 -rR -n "$WORKERS" --dist load --maxschedchunk 1 -m "not soak"
# Contention, one test at a time, for each has dozens of processes. None is tried again: a promise that is broken once is broken.
suite tests/chaos -m "not soak"
exit "$code"
