"""What a package is found by: its name, description, task, tags and keywords, as one text."""

import re

from expertctl.reference import PackageName
from expertctl.schema.manifest import Manifest

MAX_LENGTH = 20_000
_BETWEEN = re.compile(r"[\W_]+")


def search_text(name: PackageName, manifest: Manifest) -> str:
    """Return the words of a package, lower-case, with one space around each."""
    routing = manifest.routing
    texts = (str(name), manifest.description, routing.task, *manifest.tags, *routing.keywords)
    return words_of(" ".join(texts))[:MAX_LENGTH]


def words_of(text: str) -> str:
    """Return the words of a text, folded to lower case, with one space around each."""
    return f" {_BETWEEN.sub(' ', text.casefold()).strip()} "
