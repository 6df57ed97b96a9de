"""Tables, JSON and YAML for the plugin's verbs. rich draws the table on a terminal; everywhere else columns are plain.

Text from the cluster is shown with its control characters escaped, so that no object can write to the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar, assert_never

import click

from leasedjob.protocol import GROUP

Object = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


class Format(StrEnum):
    """Values of -o; TABLE is the default and has no spelling."""

    TABLE = ""
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def format_option(*formats: Format) -> Callable[[F], F]:
    """-o/--output with the formats that the verb knows; the function receives a `Format`."""
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice([str(f) for f in formats]),
        default=None,
        callback=lambda _ctx, _param, value: Format(value or ""),
        help="Output format; default: a table." if Format.WIDE in formats else "Output format; default: one line.",
    )


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    cell: makes the text of one row's cell. wide: shown with `-o wide` only. coloured: an outcome, shown in its colour.
    """

    header: str
    cell: Callable[[Object], str]
    wide: bool = False
    coloured: bool = False


NONE = "<none>"  # as kubectl shows an absent value

COLOURS = {
    "Success": "green",
    "Ready": "green",
    "Failed": "red",
    "False": "red",
    "Retrying": "yellow",
    "Cancelled": "yellow",
    "Replaced": "yellow",
    "Unknown": "yellow",
}


def show_table(rows: Iterable[Object], columns: Sequence[Column], *, wide: bool, headers: bool) -> None:
    """Writes the rows to stdout: with rich on a terminal, else padded with three blanks as kubectl does."""
    shown = [column for column in columns if wide or not column.wide]
    cells = [[printable(column.cell(row)) or NONE for column in shown] for row in rows]
    if sys.stdout.isatty() and _rich_table(shown, cells, headers):
        return
    lines = ([[column.header for column in shown]] if headers else []) + cells
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(shown))]
    for line in lines:
        click.echo("   ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _rich_table(shown: Sequence[Column], cells: list[list[str]], headers: bool) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, show_header=headers, pad_edge=False, padding=(0, 3, 0, 0))
    for column in shown:
        table.add_column(column.header, no_wrap=True)
    for line in cells:
        table.add_row(
            *(
                Text(text, style=COLOURS.get(text.split(" ")[0].rstrip(":"), "") if column.coloured else "")
                for column, text in zip(shown, line, strict=True)
            )
        )
    console = Console(highlight=False)
    # As kubectl: a long line is the terminal's to wrap; columns are never squeezed or cut.
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=10_000)).maximum)
    console.print(table)
    return True


def show_object(body: Object, output: Format, note: str = "") -> None:
    """Writes one object in `output`; for TABLE and WIDE its kubectl-style name and `note`, as `kubectl create` does."""
    match output:
        case Format.JSON | Format.YAML:
            dump(_without_managed_fields(body), output)
        case Format.NAME:
            click.echo(qualified(body))
        case Format.TABLE | Format.WIDE:
            click.echo(f"{qualified(body)} {note}".rstrip())
        case _:
            assert_never(output)


def dump(value: object, output: Format) -> None:
    """JSON or YAML to stdout. Keys keep the API server's order."""
    if output is Format.JSON:
        import json

        click.echo(json.dumps(value, indent=4, ensure_ascii=False))
        return
    click.echo(_as_yaml(value), nl=False)


def dump_documents(bodies: Sequence[Object], output: Format) -> None:
    """Several objects to stdout, as `kubectl apply -f -` reads them: YAML documents, or one JSON object or `List`."""
    if output is Format.YAML:
        click.echo("---\n".join(_as_yaml(body) for body in bodies), nl=False)
    elif len(bodies) == 1:
        dump(bodies[0], output)
    else:
        dump(as_list(bodies), output)


def _as_yaml(value: object) -> str:
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Text of several lines, such as a script in `args`, stays readable."""

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def as_list(items: Sequence[Object]) -> Object:
    """The `List` in which kubectl wraps several objects."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "metadata": {"resourceVersion": ""},
        "items": [_without_managed_fields(item) for item in items],
    }


def qualified(body: Object) -> str:
    """`leasedjob.leasedjob.io/hello`: kubectl's -o name."""
    return f"{str(body.get('kind', '')).lower()}.{GROUP}/{body['metadata']['name']}"


def _without_managed_fields(body: Object) -> Object:
    metadata = {key: value for key, value in body.get("metadata", {}).items() if key != "managedFields"}
    return {**body, "metadata": metadata}


# --- words ------------------------------------------------------------------------------------------------------------


def printable(text: object) -> str:
    """One line without control characters; what was there is shown escaped."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def parse_time(value: object) -> datetime | None:
    """An API server's RFC 3339 time; None where there is none."""
    try:
        return datetime.fromisoformat(str(value)).astimezone(UTC) if value else None
    except ValueError:
        return None


def ago(value: object, now: datetime) -> str:
    """`5m` since a time, or `in 5m` where it lies ahead; empty where there is none."""
    when = parse_time(value)
    if when is None:
        return ""
    seconds = (now - when).total_seconds()
    return duration(seconds) if seconds >= 0 else f"in {duration(-seconds)}"


def duration(seconds: float) -> str:
    """At most two units, coarser as it grows: 45s, 3m20s, 12m, 3h5m, 2d4h, 40d."""
    whole = int(seconds)
    for size, unit, finer, finer_unit, until in (
        (86_400, "d", 3_600, "h", 8),
        (3_600, "h", 60, "m", 8),
        (60, "m", 1, "s", 10),
    ):
        if whole >= size:
            count, rest = divmod(whole, size)
            finer_count = rest // finer
            return f"{count}{unit}{finer_count}{finer_unit}" if finer_count and count < until else f"{count}{unit}"
    return f"{whole}s"
