"""MkDocs' hooks: the site has all of docs/, and what its pages link to elsewhere in the repository.

Pages are written for whoever reads them in the repository: links are relative paths to files. Here those that leave
docs/ lead to a page of the site (a README, the changelog) or to a copy of the file. Nothing on the site is fetched from
elsewhere.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
# Pages that stand elsewhere in the repository, and where they are on the site.
ELSEWHERE: Final = {
    "README.md": "index.md",  # the site has a first page of its own
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "charts/leasedjob/README.md": "reference/chart.md",
}
_NOWHERE: Final[list[Any]] = []
# Where a page stands that mkdocs.yml doesn't name; the first that fits.
SECTIONS: Final = (
    ("howto-", "How-to guides"),
    ("guide-", "How-to guides"),
    ("reference/", "Reference"),
    ("examples/", "Examples"),
    ("runbooks/", "Runbooks"),
    ("decisions/", "Design decisions"),
    ("", "Explanation"),
)
_LINK: Final = re.compile(r"(!?\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\])\(([^)\s]+)\)")
_TITLE: Final = re.compile(r"^(\s*```\w+) ([\w./-]+)$")
_NOTICE: Final = re.compile(r"\A<!--.*?-->\s*", re.DOTALL)
_MARKS: Final = re.compile(r"^(\s*```\w+) (?:run|cluster|fragment=|skip=).*$")  # they are for the tests
_LOADED: Final = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
_FENCE: Final = re.compile(r"^(\s*)(```+|~~~+)")


def pages_elsewhere() -> dict[str, str]:
    """Path in the repository -> path on the site, of Markdown that doesn't stand in docs/."""
    found = {path: uri for path, uri in ELSEWHERE.items() if (ROOT / path).exists()}
    for readme in sorted((ROOT / "examples").rglob("README.md")):
        path = readme.relative_to(ROOT).as_posix()
        found[path] = path
    return found


def repository_path(uri: str) -> str:
    """Where a page of the site stands in the repository."""
    for path, there in pages_elsewhere().items():
        if there == uri and path != "README.md":
            return path
    return f"docs/{uri}"


def site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
        path = f"{path}/README.md"
    return pages_elsewhere().get(path, f"files/{path}")


def links(text: str) -> Iterator[str]:
    """The targets of a page's links, outside code blocks."""
    for line in _prose(text.splitlines()):
        for match in _LINK.finditer(line):
            yield match[2]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the navigation with what it doesn't name."""
    nav: list[dict[str, Any]] = config.nav or []
    named = set(_named(nav))
    present = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")} | {*pages_elsewhere().values()}
    for uri in sorted(present - named):
        title = next(title for start, title in SECTIONS if uri.startswith(start))
        _section(nav, title).append(uri)
    return config


def _section(nav: list[Any], title: str) -> list[Any]:
    """The entries of the section with this title, at any depth."""
    for entry in nav:
        if isinstance(entry, dict):
            for name, inner in entry.items():
                if name == title:
                    found: list[Any] = inner
                    return found
                if isinstance(inner, list) and (below := _section(inner, title)) is not _NOWHERE:
                    return below
    return _NOWHERE


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages from elsewhere, and files that a page links to."""
    for path, uri in pages_elsewhere().items():
        if path != "README.md":
            files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    linked = set()
    for page in files.documentation_pages():
        source = repository_path(page.src_uri)
        for target in links(page.content_string):
            if outside := _outside(source, target):
                linked.add(outside)
    for path in sorted(linked):
        uri = site_path(path)
        if files.get_file_from_path(uri) is None and (ROOT / path).is_file():
            files.append(File.generated(config, uri, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links from paths of the repository into paths of the site."""
    source = repository_path(page.file.src_uri)
    inside = False
    lines = []
    # What says that a page is generated stands before its heading, which wouldn't be its title then.
    for line in _NOTICE.sub("", markdown).split("\n"):
        if _FENCE.match(line):
            inside = not inside
            line = _MARKS.sub(r"\1", _TITLE.sub(r'\1 title="\2"', line))
            # No drawing without a script from elsewhere: the text of the diagram has to do.
            line = line.replace("```mermaid", "```text")
        lines.append(line if inside else _LINK.sub(lambda m: f"{m[1]}({_moved(source, page, m[2])})", line))
    return "\n".join(lines)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a page that loads anything from elsewhere."""
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        if found := _LOADED.findall(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads {', '.join(sorted(set(found)))}")


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from _named(entry)
    elif isinstance(nav, list):
        for entry in nav:
            yield from _named(entry)


def _prose(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            yield line


def _outside(source: str, target: str) -> str | None:
    """The file in the repository that a link leads to, if no page below docs/ is meant."""
    if re.match(r"[a-z][a-z0-9+.-]*:|#|//", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(target.partition("#")[0])))
    if path.startswith(".."):
        raise ValueError(f"{source}: the link {target} leaves the repository")
    return None if path.startswith("docs/") and source.startswith("docs/") else path


def _moved(source: str, page: Page, target: str) -> str:
    path = _outside(source, target)
    if path is None:
        return target
    _, hash_, anchor = target.partition("#")
    here = os.path.dirname(page.file.src_uri) or "."
    return f"{posixpath.relpath(site_path(path), here)}{hash_}{anchor}"
