#!/usr/bin/env bash
# Asks a vulnerability service about every package that the images install, by their lock files: `make audit`.
# The service is on the network: https://pypi.org, or with AUDIT_SERVICE=osv https://api.osv.dev. Where it can't be reached
# NOTHING IS AUDITED, which is said; with AUDIT=required (set it in the CI that has the network) that is an error.
set -euo pipefail
: "${BIN:?}"
cd "$(dirname "$0")/.."
service=${AUDIT_SERVICE:-pypi}
case $service in
    pypi | osv) ;;
    *) echo "AUDIT_SERVICE=$service: pypi or osv" >&2; exit 2 ;;
esac
skip() {
    printf '%s\n' "THE DEPENDENCIES WERE NOT AUDITED: $1" >&2
    [ "${AUDIT:-}" != required ] || exit 1
    exit 0
}
[ -x "$BIN/pip-audit" ] || "$BIN/python" -m pip install --quiet --disable-pip-version-check "pip-audit>=2.9,<3" || skip "pip-audit can't be installed"
report=$(mktemp)
trap 'rm -f "$report"' EXIT
code=0
for lock in operator sidecar postgresql build; do
    # It ends well, and says that nothing is known, also where the service knows none of the packages: its report tells.
    "$BIN/pip-audit" --vulnerability-service "$service" --disable-pip --require-hashes --progress-spinner off --timeout 20 \
        --format json --output "$report" --requirement "requirements/$lock.txt" 2> "$report.log" || true
    verdict=0
    "$BIN/python" - "$lock" "$report" <<'PYTHON' || verdict=$?
import json, sys
lock, path = sys.argv[1:]
try:
    with open(path) as file:
        packages = json.load(file)["dependencies"]
except (OSError, ValueError, KeyError):
    sys.exit(3)
asked = [p for p in packages if "skip_reason" not in p]
if not asked:
    sys.exit(3)
bad = [(p["name"], p["version"], v["id"], v.get("fix_versions")) for p in asked for v in p["vulns"]]
print(f"requirements/{lock}.txt: {len(asked)} of {len(packages)} packages audited, {len(bad)} vulnerabilities")
for name, version, what, fixed in bad:
    print(f"  {name} {version}: {what}, fixed in {', '.join(fixed or ['no version']) }")
for p in packages:
    if "skip_reason" in p:
        print(f"  NOT AUDITED: {p['name']}: {p['skip_reason']}")
sys.exit(1 if bad or len(asked) < len(packages) else 0)
PYTHON
    rm -f "$report.log"
    [ "$verdict" != 3 ] || skip "the service $service can't be reached, or knows none of the packages"
    [ "$verdict" = 0 ] || code=1
done
exit "$code"
