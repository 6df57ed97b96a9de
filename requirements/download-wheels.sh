#!/bin/sh
# Fills wheels/ with what the images install, so that they can be built without a network: download-wheels.sh [ARCH] [PIP] [FOLDER]
# An empty wheels/ means that the build installs from the package index.
set -eu
cd "$(dirname "$0")/.."
arch=${1:-$(uname -m)}
pip=${2:-pip}
folder=${3:-wheels}
for lock in operator sidecar build postgresql; do
    $pip download --quiet --no-deps --require-hashes --only-binary=:all: --dest "$folder" --implementation cp --abi cp313 --abi abi3 \
        --abi none --python-version 3.13 --platform "manylinux_2_28_$arch" --platform "manylinux_2_17_$arch" \
        --platform "manylinux2014_$arch" --platform any -r "requirements/$lock.txt"
done
