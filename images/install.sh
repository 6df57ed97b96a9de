#!/bin/sh
# install.sh DIRECTORY LOCK: a virtual environment with exactly what the lock file names, from /wheels if it holds any wheel.
set -eu
source=
for wheel in /wheels/*.whl; do
    [ ! -e "$wheel" ] || source="--no-index --find-links=/wheels"
    break
done
python3 -m venv --without-pip "$1"
# shellcheck disable=SC2086  # two words or none
/opt/pip/bin/pip --python "$1/bin/python3" install --no-deps --require-hashes --only-binary=:all: --no-compile $source -r "$2"
# By content, not by time: a copied layer keeps them valid, and two builds agree.
"$1/bin/python3" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$1/lib"
