"""``expertctl gc``: files that nothing needs."""

from typing import Annotated

import typer

from expertctl.cli.output import JsonFlag, counted, emit, human_size
from expertctl.install.collect import collect, garbage
from expertctl.settings import load_settings
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete files that nothing needs. What killed installs left is among them.

    Example: expertctl gc --dry-run
    """
    home = load_settings().home
    store, bases = Store(home.store), BaseStore(home.bases)
    freed = garbage(store, bases) if dry_run else collect(store, bases)
    document = {
        "dry_run": dry_run,
        "blobs": [str(digest) for digest in freed.blobs],
        "folders": [str(folder) for folder in freed.folders],
        "copies": [str(copy) for copy in freed.copies],
        "size": freed.size,
    }
    verb = "would free" if dry_run else "freed"
    text = f"{verb} {human_size(freed.size)}: {len(freed.blobs)} files, "
    text += f"{len(freed.folders)} folders of killed processes"
    if freed.copies:
        text += f", {counted(len(freed.copies), 'quantised base')} of another version"
    emit(document, text, as_json=as_json)
