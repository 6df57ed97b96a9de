# Sourced. suite ARGUMENTS: runs pytest with them and with $PYTEST's options, and keeps a failure in $code.
# shellcheck shell=bash
code=0
suite() {
    local failed=0
    # shellcheck disable=SC2086  # PYTEST holds options
    "$BIN/pytest" -q "$@" ${PYTEST:-} || failed=$?
    # 5: no test was selected, which is no failure where PYTEST narrows the choice.
    [ "$failed" = 0 ] || { [ "$failed" = 5 ] && [ -n "${PYTEST:-}" ]; } || code=$failed
}
