#!/bin/sh
# Signs a file, such as the list of the images' digests or a bill of materials, with an Ed25519 key; needs openssl and no network.
#   sign.sh key FOLDER           makes release.key (keep it secret) and release.pub
#   sign.sh sign KEY FILE        writes FILE.sig
#   sign.sh verify PUB FILE      checks FILE against FILE.sig; exits with 1 if it is not what was signed
set -eu
usage() { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
case "${1:-}:$#" in
    key:2)
        umask 077
        [ ! -e "$2/release.key" ] || { echo "$2/release.key exists" >&2; exit 1; }
        openssl genpkey -algorithm ed25519 -out "$2/release.key"
        openssl pkey -in "$2/release.key" -pubout -out "$2/release.pub"
        ;;
    sign:3) openssl pkeyutl -sign -rawin -inkey "$2" -in "$3" -out "$3.sig" ;;
    verify:3) openssl pkeyutl -verify -rawin -pubin -inkey "$2" -in "$3" -sigfile "$3.sig" ;;
    *) usage ;;
esac
