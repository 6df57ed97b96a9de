#!/usr/bin/env bash
# Unit and integration tests, and meanwhile the tests on the real cluster, which wait more than they compute.
# The cluster's output follows when both are done. Fails if any of them did.
set -uo pipefail
cd "$(dirname "$0")/.."
make=${MAKE:-make}
log=$(mktemp)
if [ "${CI:-}" = true ]; then
    # One after the other: where a red run costs more than minutes, nothing is timed beside something else.
    rm -f "$log"
    code=0
    for target in sbom audit programs unit integration e2e; do "$make" --no-print-directory "$target" < /dev/null || code=1; done
    exit "$code"
fi
"$make" --no-print-directory e2e > "$log" 2>&1 < /dev/null &
cluster=$!
trap 'kill "$cluster" 2> /dev/null; wait "$cluster"; rm -f "$log"' INT TERM
echo "the tests on a real cluster run meanwhile; their output follows at the end ($log)"
code=0
# Unit tests come last: they render the chart by helm, which the first run on a machine has built by then.
"$make" --no-print-directory integration || code=1
"$make" --no-print-directory unit || code=1
wait "$cluster" || code=1
cat "$log"
rm -f "$log"
exit "$code"
