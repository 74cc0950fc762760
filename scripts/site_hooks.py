"""Hooks of mkdocs: pages and files outside ``docs/`` become parts of the site, as links name them.

Pages are written for GitHub, where ``../SECURITY.md`` or ``../../schemas/index.schema.json`` lead
to files of the repository. `PAGES` are rendered as pages of the site. Every other file of the
repository that a page links to is copied below ``files/``. Links are rewritten in both directions;
a link to something that does not exist stays, and ``mkdocs build --strict`` refuses it.

See https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = "docs"
COPIES = "files"
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/starter/README.md": "starter-pack.md",
    "examples/moe/README.md": "mixture-of-experts-base.md",
    "sdk/typescript/README.md": "typescript-client.md",
}
"""Pages outside ``docs/``, by path in the repository, and their paths in the site."""
_ORIGINS = {target: origin for origin, target in PAGES.items()}
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and all files that some page links to."""
    pages = [ROOT / DOCS / page.src_uri for page in files.documentation_pages()]
    for origin, target in PAGES.items():
        text = (ROOT / origin).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    linked = {path for page in [*pages, *map(ROOT.joinpath, PAGES)] for path in find_linked(page)}
    for path in sorted(linked):
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, f"{COPIES}/{path}", content=content))
    return files


def find_linked(page: Path) -> Iterator[str]:
    """Yield the files outside ``docs/`` that a page links to and that are no pages of the site."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.finditer(text):
        path = resolve_link(page.relative_to(ROOT).as_posix(), link[2])
        if not path.startswith(f"{DOCS}/") and path not in PAGES and (ROOT / path).is_file():
            yield path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page; code blocks stay."""
    uri = page.file.src_uri
    parts, position = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [rewrite_links(markdown[position : fence.start()], uri), fence[0]]
        position = fence.end()
    return "".join([*parts, rewrite_links(markdown[position:], uri)])


def rewrite_links(text: str, uri: str) -> str:
    """Return Markdown with links to paths of the site; ``uri`` is the path of its page there."""
    origin = _ORIGINS.get(uri, f"{DOCS}/{uri}")

    def rewrite(link: re.Match[str]) -> str:
        target = locate(resolve_link(origin, link[2]))
        if target is None:
            return link[0]
        relative = os.path.relpath(target, PurePosixPath(uri).parent)
        return f"{link[1]}{PurePosixPath(relative)}{link[3] or ''}{link[4]}"

    return _LINK.sub(rewrite, text)


def resolve_link(origin: str, link: str) -> str:
    """Return the path in the repository that a link of a page means."""
    return os.path.normpath(PurePosixPath(origin).parent / link)


def locate(path: str) -> str | None:
    """Return where a file of the repository is in the site; None if it is not there."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if path in PAGES:
        return PAGES[path]
    return f"{COPIES}/{path}" if (ROOT / path).is_file() else None
