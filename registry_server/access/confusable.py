"""Names that look alike: two names are confusable when their skeletons are equal.

Names are lower-case ASCII letters, digits and dashes (``expertctl.reference``), so this folds what
looks alike among those: ``1``, ``l`` and ``i``; ``0`` and ``o``; ``rn`` and ``m``; ``vv`` and
``w``; dashes anywhere.
"""

_LOOK_ALIKES = str.maketrans({"1": "l", "i": "l", "0": "o", "-": None, "_": None, ".": None})
_PAIRS = (("rn", "m"), ("vv", "w"))

RESERVED = frozenset(
    [
        "account",
        "accounts",
        "admin",
        "administrator",
        "all",
        "anonymous",
        "api",
        "auth",
        "blobs",
        "catalog",
        "docs",
        "everyone",
        "expert",
        "expertctl",
        "experts",
        "favicon",
        "healthz",
        "help",
        "index",
        "keys",
        "latest",
        "library",
        "local",
        "localhost",
        "login",
        "logout",
        "manifests",
        "me",
        "metrics",
        "namespaces",
        "new",
        "none",
        "null",
        "official",
        "packages",
        "public",
        "readyz",
        "registry",
        "robots",
        "root",
        "search",
        "security",
        "settings",
        "signin",
        "signup",
        "starter",
        "static",
        "stats",
        "support",
        "system",
        "tags",
        "test",
        "token",
        "tokens",
        "tuf",
        "uploads",
        "user",
        "users",
        "v1",
        "v2",
        "web",
        "whoami",
        "www",
    ]
)
"""Words that name parts of the registry, or that would pretend to speak for it."""


def skeleton(name: str) -> str:
    """Return ``name`` with look-alike characters folded."""
    folded = name.translate(_LOOK_ALIKES)
    for pair, single in _PAIRS:
        folded = folded.replace(pair, single)
    return folded


RESERVED_SKELETONS = frozenset(skeleton(word) for word in RESERVED)


def is_reserved(name: str) -> bool:
    """Tell whether ``name`` is a reserved word, or looks like one."""
    return skeleton(name) in RESERVED_SKELETONS
