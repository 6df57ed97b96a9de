-- The owner and its database, made if missing; the password is set at each start.
\set user `cat "$CREDENTIALS/user"`
\set password `cat "$CREDENTIALS/password"`
\set dbname `cat "$CREDENTIALS/dbname"`
SELECT format('CREATE ROLE %I LOGIN CREATEROLE', :'user')
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'user') \gexec
SELECT format('ALTER ROLE %I PASSWORD %L', :'user', :'password') \gexec
SELECT format('CREATE DATABASE %I OWNER %I', :'dbname', :'user')
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'dbname') \gexec
