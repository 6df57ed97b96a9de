#!/usr/bin/env bash
# Runs the tests that need a PostgreSQL or an API server without nodes, and brings PgBouncer for those that go through it.
set -euo pipefail
: "${BIN:?}" "${WORKERS:?}"
cd "$(dirname "$0")/.."

if [ -z "${LEASEDJOB_TEST_PGBOUNCER:-}" ] && ! command -v pgbouncer > /dev/null; then
    tools=$(mktemp -d -t leasedjob-tools-XXXXXX)
    trap 'rm -rf "$tools"' EXIT
    chmod 755 "$tools"
    if LEASEDJOB_TEST_PGBOUNCER=$("$BIN/python" -m tests.cluster pgbouncer "$tools" | tail -n 1) && [ -n "$LEASEDJOB_TEST_PGBOUNCER" ]; then
        export LEASEDJOB_TEST_PGBOUNCER
    elif [ "${CI:-}" = true ]; then
        exit 1
    else
        unset LEASEDJOB_TEST_PGBOUNCER
        echo "THE TESTS BEHIND PGBOUNCER WILL BE SKIPPED" >&2
    fi
fi
# A test here waits for real processes on a machine that may be busy with others: one that fails is tried twice more, which
# the output counts as "rerun". What fails three times is broken.
# shellcheck disable=SC2086  # PYTEST holds options
"$BIN/pytest" -q tests/integration tests/controller --reruns 2 -rR -n "$WORKERS" --dist worksteal -m "not soak" ${PYTEST:-}
