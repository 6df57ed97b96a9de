#!/bin/sh
# Renews the lock files of the images, with hashes and without any index address. Needs `uv`. Arguments go to it, e.g. --upgrade.
set -eu
cd "$(dirname "$0")/.."
lock() { # OUTPUT INPUT [EXTRA...]
    out=requirements/$1
    in=$2
    shift 2
    uv pip compile --quiet --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        --only-binary :all: --python-version 3.13 --python-platform x86_64-manylinux_2_28 "$@" -o "$out" "$in"
}
lock operator.txt pyproject.toml --extra operator "$@"
lock sidecar.txt pyproject.toml "$@"
lock build.txt requirements/build.in "$@"
lock postgresql.txt requirements/postgresql.in --no-deps "$@"
