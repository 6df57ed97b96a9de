"""`kubectl_complete-leasedjob`: what kubectl asks for the completions of `kubectl leasedjob`.

kubectl passes the words after the plugin's name, the last one unfinished and perhaps empty, and reads lines
`value<TAB>description` and a last line `:directive` (the protocol of its command library, cobra).
"""

from __future__ import annotations

import sys
from enum import IntFlag

from click.shell_completion import CompletionItem, ShellComplete

from leasedjob.cli.kubectl import COMPLETE_VAR, PROGRAM, plugin


class Directive(IntFlag):
    """cobra's ShellCompDirective: what the shell does beside showing the values."""

    DEFAULT = 0  # file names if there is no value
    NO_FILES = 4


def answer(words: list[str]) -> str:
    """The lines that kubectl reads. `words`: the command line behind the plugin's name; the last is unfinished."""
    *before, incomplete = words or [""]
    items = ShellComplete(plugin, {}, PROGRAM, COMPLETE_VAR).get_completions(before, incomplete)
    directive = Directive.DEFAULT if any(item.type in ("file", "dir") for item in items) else Directive.NO_FILES
    return "\n".join([*(_line(item) for item in items if item.type == "plain"), f":{int(directive)}"])


def _line(item: CompletionItem) -> str:
    return f"{item.value}\t{' '.join(item.help.split())}" if item.help else str(item.value)


def main() -> None:
    """Prints the completions for sys.argv."""
    print(answer(sys.argv[1:]))


if __name__ == "__main__":
    main()
