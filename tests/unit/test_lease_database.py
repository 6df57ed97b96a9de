"""Credentials, and what the database's faults are taken for."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, errors

from leasedjob.errors import (
    DatabaseRefusedError,
    DatabaseUnavailableError,
    LostJobLeaseError,
    SchemaMissingError,
)
from leasedjob.lease.database import Credentials, FaultKind, as_error, classify, translated

# --- credentials -----------------------------------------------------------------------------------------------------


def write(directory: Path, **files: str) -> Path:
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


def read(directory: Path, **overrides: str) -> dict[str, object]:
    return dict(conninfo.conninfo_to_dict(Credentials.from_directory(directory, **overrides).conninfo()))


def test_files_of_a_secret(tmp_path: Path) -> None:
    write(tmp_path, host="db.example", port="5433\n", dbname="jobs", username="me", password=" p w ", sslmode="require")
    assert read(tmp_path) == {
        "host": "db.example",
        "port": "5433",
        "dbname": "jobs",
        "user": "me",
        "password": " p w ",
        "sslmode": "require",
    }


@pytest.mark.parametrize("name", ["uri", "url"])
def test_a_uri_is_the_base_and_files_win(tmp_path: Path, name: str) -> None:
    write(tmp_path, **{name: "postgresql://me:old@db:5432/jobs?sslmode=prefer\n"}, password="new")
    assert read(tmp_path) == {
        "host": "db",
        "port": "5432",
        "dbname": "jobs",
        "user": "me",
        "password": "new",
        "sslmode": "prefer",
    }


def test_files_are_read_again_each_time(tmp_path: Path) -> None:
    credentials = Credentials.from_directory(write(tmp_path, host="db", password="one"))
    assert "one" in credentials.conninfo()
    write(tmp_path, password="two")
    assert "two" in credentials.conninfo()


def test_certificates(tmp_path: Path) -> None:
    write(tmp_path, host="db", ca__crt="-----BEGIN", tls__crt="-----BEGIN", tls__key="-----BEGIN")
    values = read(tmp_path)
    assert values["sslrootcert"] == str(tmp_path / "ca.crt")
    assert (values["sslcert"], values["sslkey"]) == (str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))
    write(tmp_path, sslrootcert="system")
    assert read(tmp_path)["sslrootcert"] == "system"
    write(tmp_path, sslrootcert="-----BEGIN CERTIFICATE-----\n")
    assert read(tmp_path)["sslrootcert"] == str(tmp_path / "sslrootcert")


def test_overrides_win(tmp_path: Path) -> None:
    write(tmp_path, host="db", port="5432")
    assert read(tmp_path, host="pooler")["host"] == "pooler"


def test_several_hosts_mean_the_one_that_can_be_written(tmp_path: Path) -> None:
    assert read(write(tmp_path, host="a,b"))["target_session_attrs"] == "read-write"
    assert "target_session_attrs" not in read(write(tmp_path, host="a"))


@pytest.mark.parametrize("missing", ["directory", "files"])
def test_absent_credentials_are_a_fault_of_configuration(tmp_path: Path, missing: str) -> None:
    directory = tmp_path / "absent" if missing == "directory" else tmp_path
    with pytest.raises(DatabaseRefusedError, match="credentials in"):
        Credentials.from_directory(directory).conninfo()


def test_a_uri_that_is_none_is_refused_without_showing_it(tmp_path: Path) -> None:
    write(tmp_path, uri="postgresql://me:secret@[")
    with pytest.raises(DatabaseRefusedError) as caught:
        Credentials.from_directory(tmp_path).conninfo()
    assert "secret" not in str(caught.value)


# --- faults ----------------------------------------------------------------------------------------------------------

CONNECTING = {
    'connection failed: FATAL:  password authentication failed for user "x"': (FaultKind.REFUSED_LOGIN, "login"),
    'FATAL:  role "x" does not exist': (FaultKind.REFUSED_LOGIN, "login"),
    'FATAL:  database "x" does not exist': (FaultKind.REFUSED_LOGIN, "database name"),
    'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "x", database "x", SSL encryption': (
        FaultKind.REFUSED_LOGIN,
        "login",
    ),
    'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "x", database "x", no encryption': (FaultKind.TLS, "TLS"),
    "server does not support SSL, but SSL was required": (FaultKind.TLS, "TLS"),
    "SSL error: certificate verify failed": (FaultKind.TLS, "certificate"),
    'server certificate for "db" does not match host name "other"': (FaultKind.TLS, "host name"),
    'root certificate file "/nowhere" does not exist': (FaultKind.TLS, "CA file"),
    "FATAL:  the database system is starting up": (FaultKind.TRANSIENT, "starting"),
    "FATAL:  server login has been failing, try again later (server_login_retry)": (FaultKind.TRANSIENT, "pooler"),
    "FATAL:  the database system is in recovery mode": (FaultKind.TRANSIENT, "failing over"),
    "FATAL:  sorry, too many clients already": (FaultKind.TRANSIENT, "max_connections"),
    'FATAL:  too many connections for role "x"': (FaultKind.TRANSIENT, "connection limit"),
    "session is read-only": (FaultKind.TRANSIENT, "standby"),
    "[Errno -2] Name or service not known": (FaultKind.TRANSIENT, "DNS"),
    "connection to server failed: Connection refused": (FaultKind.TRANSIENT, "mesh"),
    "connection timeout expired": (FaultKind.TRANSIENT, "NetworkPolicies"),
    "Network is unreachable": (FaultKind.TRANSIENT, "NetworkPolicy"),
    "server closed the connection unexpectedly": (FaultKind.TRANSIENT, "connection"),
}


@pytest.mark.parametrize(("text", "expected"), CONNECTING.items(), ids=CONNECTING.keys())
def test_failures_while_connecting(text: str, expected: tuple[FaultKind, str]) -> None:
    fault = classify(psycopg.OperationalError(text))
    assert fault.kind is expected[0]
    assert expected[1] in fault.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.AdminShutdown, FaultKind.TRANSIENT),
        (errors.CannotConnectNow, FaultKind.TRANSIENT),
        (errors.TooManyConnections, FaultKind.TRANSIENT),
        (errors.ReadOnlySqlTransaction, FaultKind.TRANSIENT),
        (errors.SerializationFailure, FaultKind.TRANSIENT),
        (errors.DeadlockDetected, FaultKind.TRANSIENT),
        (errors.LockNotAvailable, FaultKind.BUSY),
        (errors.QueryCanceled, FaultKind.TRANSIENT),
        (errors.ConnectionFailure, FaultKind.TRANSIENT),
        (errors.DiskFull, FaultKind.TRANSIENT),
        (errors.InvalidPassword, FaultKind.REFUSED_LOGIN),
        (errors.InvalidCatalogName, FaultKind.REFUSED_LOGIN),
        (errors.InsufficientPrivilege, FaultKind.REFUSED_LOGIN),
        (errors.UndefinedFunction, FaultKind.MISSING_SCHEMA),
        (errors.UndefinedTable, FaultKind.MISSING_SCHEMA),
        (errors.InvalidSchemaName, FaultKind.MISSING_SCHEMA),
        (errors.DivisionByZero, FaultKind.BUG),
        (errors.FeatureNotSupported, FaultKind.BUG),
        (errors.UniqueViolation, FaultKind.BUG),
    ],
)
def test_by_sqlstate(error: type[psycopg.Error], kind: FaultKind) -> None:
    fault = classify(error("what happened"))
    assert fault.kind is kind
    assert "what happened" in fault.message
    assert fault.transient == (kind in (FaultKind.TRANSIENT, FaultKind.BUSY))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), FaultKind.TRANSIENT),
        (ConnectionRefusedError(111, "Connection refused"), FaultKind.TRANSIENT),
        (psycopg.InterfaceError("the connection is closed"), FaultKind.TRANSIENT),
        (KeyError("x"), FaultKind.BUG),
        (DatabaseUnavailableError("x", FaultKind.BUSY), FaultKind.BUSY),
        (DatabaseRefusedError("x", FaultKind.TLS), FaultKind.TLS),
        (SchemaMissingError(), FaultKind.MISSING_SCHEMA),
    ],
)
def test_other_exceptions(error: BaseException, kind: FaultKind) -> None:
    assert classify(error).kind is kind


def test_faults_become_this_packages_exceptions_chained() -> None:
    cause = errors.LockNotAvailable("could not obtain lock")
    with pytest.raises(DatabaseUnavailableError) as caught, translated():
        raise cause
    assert caught.value.__cause__ is cause
    assert caught.value.kind == "busy"


@pytest.mark.parametrize("error", [errors.UniqueViolation("x"), KeyError("x"), LostJobLeaseError("id")])
def test_bugs_and_ones_own_exceptions_are_raised_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, translated():
        raise error
    assert caught.value is error


def test_as_error_knows_no_bug() -> None:
    assert as_error(KeyError("x")) is None
    assert isinstance(as_error(errors.UndefinedTable("x")), SchemaMissingError)
