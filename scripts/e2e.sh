#!/usr/bin/env bash
# Runs the tests that need a cluster. Brings the test cluster up if it isn't, and then removes it afterwards.
# Where no cluster can be had it says so; with CI=true that is an error.
set -euo pipefail
: "${BIN:?}" "${TEST_CLUSTER:?}" "${E2E_WORKERS:?}"
cd "$(dirname "$0")/.."
export LEASEDJOB_TEST_CLUSTER=$TEST_CLUSTER
cluster() { "$BIN/python" -m tests.cluster "$@"; }

if ! reason=$(cluster can 2>&1); then
    printf '\n%s\n' "################################################################################" "$reason" \
        "THE TESTS ON A REAL CLUSTER DID NOT RUN" "################################################################################" >&2
    [ "${CI:-}" != true ] || exit 1
    exit 0
fi

was_up=
if cluster kubeconfig "$TEST_CLUSTER" > /dev/null 2>&1; then was_up=yes; fi
finish() {
    code=$?
    [ -n "$was_up" ] || cluster down "$TEST_CLUSTER" > /dev/null || code=$((code ? code : 1))
    exit "$code"
}
trap finish EXIT
cluster up "$TEST_CLUSTER"
cluster postgres "$TEST_CLUSTER"
cluster images "$TEST_CLUSTER" > /dev/null
# shellcheck disable=SC2086  # PYTEST holds options
"$BIN/pytest" -q tests/e2e --reruns 1 -n "$E2E_WORKERS" -m "not soak" --timeout 600 ${PYTEST:-}
