#!/usr/bin/env bash
# Runs the tests that need a cluster. Brings the test cluster up if it isn't, and then removes it afterwards.
# Where no cluster can be had it says so; with CI=true that is an error. The last lines are pytest's own summaries.
set -euo pipefail
: "${BIN:?}" "${TEST_CLUSTER:?}" "${E2E_WORKERS:?}"
cd "$(dirname "$0")/.."
. scripts/suite.sh
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
export LEASEDJOB_E2E_RUN=$$-$RANDOM # both calls use one release
part() { suite tests/e2e --reruns 1 -rR --timeout 600 "$@"; }
if [ -n "${SOAK:-}" ]; then # `make soak`
    part -n 0 -m soak --timeout 3600 -rP
    exit "$code"
fi
part -n "$E2E_WORKERS" -m "not soak and not node and not pair"
part -n 0 -m "node and not soak" # these hit the node and the operator: one after the other, and beside nothing else
[ -n "$was_up" ] || cluster down "$TEST_CLUSTER" > /dev/null
part -n 0 -m "pair and not soak" # two clusters of their own
exit "$code"
