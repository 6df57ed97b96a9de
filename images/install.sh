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
# By content, not by time: a copied layer keeps them valid. One process for each package: what is compiled depends a little on
# what the same process has compiled before, so that sharing the files out by chance would make each build another image.
for modules in "$1"/lib/python3*/site-packages; do
    "$1/bin/python3" -m compileall -q -l --invalidation-mode unchecked-hash "$modules"
    find "$modules" -mindepth 1 -maxdepth 1 -type d ! -name '*.dist-info' ! -name __pycache__ -print0 \
        | PYTHONHASHSEED=0 xargs -0 -r -n 1 -P "$(nproc)" "$1/bin/python3" -m compileall -q --invalidation-mode unchecked-hash
done
