#!/bin/sh
# One PostgreSQL for trying LeasedJob out. The database and its owner follow from the files in $CREDENTIALS (user, password,
# dbname), read at each start, so that data of an earlier start and a newer password agree. The owner is no superuser: it
# may make roles, which is what LeasedJob asks of any database. The superuser has no password and is reached from inside
# the container only. Arguments go to the server.
set -eu
export CREDENTIALS="${CREDENTIALS:-/etc/leasedjob/database}"
run=/tmp
export PGHOST=$run PGUSER=postgres PGDATABASE=postgres

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    # Beside it and then renamed: a start that is cut off leaves nothing that looks like a database.
    rm -rf "$PGDATA" "$PGDATA.new"
    initdb -D "$PGDATA.new" -U postgres -E UTF8 --locale=C.UTF-8 --auth-local=peer --auth-host=scram-sha-256 > /dev/null
    echo 'host all all all scram-sha-256' >> "$PGDATA.new/pg_hba.conf"
    mv "$PGDATA.new" "$PGDATA"
fi
chmod 0700 "$PGDATA" # a volume's fsGroup may have widened it, which the server refuses

pg_ctl -D "$PGDATA" -w -s -o "-c listen_addresses='' -k $run" start > /dev/null
psql -q -v ON_ERROR_STOP=1 -f "$(dirname "$0")/owner.sql"
pg_ctl -D "$PGDATA" -w -s -m fast stop
exec postgres -D "$PGDATA" -c listen_addresses='*' -c unix_socket_directories=$run "$@"
