"""What shells complete: installed experts, packages of known registries, bases, keys, settings.

Each function takes the word so far, which typer passes by name, and reads only local files. A
shell completes file names where nothing is returned, so a damaged home is no error here.
"""

import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from typer import _completion_classes
from typer._click.shell_completion import add_completion_class, split_arg_string  # not public

from expertctl.errors import ExpertError, to_single_line
from expertctl.settings import CONFIG_KEYS, Home, find_home

_List = Callable[[Home], Iterable[str]]


def _completion(list_names: _List) -> Callable[[str], list[str]]:
    """Return a function for typer that returns those names that begin with the word so far."""

    @wraps(list_names, assigned=("__doc__", "__name__"), updated=())
    def complete(incomplete: str) -> list[str]:
        try:
            return sorted({each for each in list_names(find_home()) if each.startswith(incomplete)})
        except (ExpertError, OSError):
            return []

    del complete.__wrapped__  # typer would look at its signature
    return complete


@_completion
def complete_experts(home: Home) -> Iterable[str]:
    """List installed experts, by name and with their versions."""
    from expertctl.store.store import Store

    for expert in Store(home.store).list_experts():
        name, _, _ = expert.ref.partition("@")
        yield from (name, expert.ref)


@_completion
def complete_packages(home: Home) -> Iterable[str]:
    """List the packages whose index documents known registries have sent."""
    from expertctl.registry.index_store import IndexStore
    from expertctl.trust.trust_store import TrustStore

    indexes = IndexStore(home.registries)
    for registry in TrustStore(home.trust).read().registries:
        yield from map(str, indexes.list_packages(registry))


@_completion
def complete_bases(home: Home) -> Iterable[str]:
    """List the bases."""
    from expertctl.store.bases import BaseStore

    return (base.name for base in BaseStore(home.bases).list_bases())


@_completion
def complete_models(_: Home) -> Iterable[str]:
    """List the short names of models of a hub."""
    from expertctl.install.hub_files import SHORT_NAMES

    return (row.name for row in SHORT_NAMES)


@_completion
def complete_own_keys(home: Home) -> Iterable[str]:
    """List the user's keys."""
    from expertctl.trust.keys import KeyRing

    return KeyRing(home.keys).list_names()


@_completion
def complete_trusted_keys(home: Home) -> Iterable[str]:
    """List the trusted keys."""
    from expertctl.trust.trust_store import TrustStore

    return (key.name for key in TrustStore(home.trust).list_keys())


@_completion
def complete_registries(home: Home) -> Iterable[str]:
    """List the registries whose keys are known."""
    from expertctl.trust.trust_store import TrustStore

    return (registry.host for registry in TrustStore(home.trust).read().registries)


@_completion
def complete_settings(_: Home) -> Iterable[str]:
    """List the settings."""
    return CONFIG_KEYS


_BREAKS = frozenset("@:")
"""Where bash begins a new word (``COMP_WORDBREAKS``) and a command line does not."""


class WholeWordCompletion(_completion_classes.BashComplete):
    """Completes for bash words such as ``acme/sql@1.0.0``, which it splits at ``@`` and ``:``.

    The words that it sends are joined again. It replaces only the last one, so an answer begins
    there. ``=`` is left to typer.
    """

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words before the cursor, without the program, and the one there."""
        words, last = join_split_words(*_read_bash_words())
        return words[1:], last

    def get_completions(self, args: list[str], incomplete: str) -> list[Any]:
        """Return what may follow, each without what bash keeps."""
        sent, at = _read_bash_words()
        last = sent[at] if at < len(sent) else ""
        kept = len(incomplete) - (0 if set(last) <= _BREAKS else len(last))
        found = super().get_completions(args, incomplete)
        for item in found:
            if kept and item.value.startswith(incomplete[:kept]):
                item.value = item.value[kept:]
        return found


def _read_bash_words() -> tuple[list[str], int]:
    """Return the words as bash splits them, and the index of the one at the cursor."""
    return split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])


def join_split_words(sent: list[str], at: int) -> tuple[list[str], str]:
    """Return the words before the one with the index ``at``, and that one, as they were typed."""
    joined: list[str] = []
    follows_break = False
    for word in sent[: at + 1]:
        is_break = bool(word) and set(word) <= _BREAKS
        if joined and (is_break or follows_break):
            joined[-1] += word
        else:
            joined.append(word)
        follows_break = is_break
    last = joined.pop() if at < len(sent) else ""
    return joined, last


def prepare_completion() -> None:
    """Let bash get whole words completed, and all shells texts of one line.

    typer folds texts to the width of a terminal, and shells take each line for a completion.
    """
    add_completion_class(WholeWordCompletion, "bash")
    _completion_classes._sanitize_help_text = to_single_line
