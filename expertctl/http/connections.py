"""How many connections one worker holds at once, and the open files that they need.

A connection that says nothing is closed after `hosting.HEADER_MILLISECONDS`, one whose body stalls
after `limits.STALL_SECONDS`. Until then it takes a place, and others wait when no place is left:
so there are many. A proxy in front can limit how many come from one address.
"""

import resource

MAX_CONNECTIONS = 8192
_OTHER_FILES = 1024
"""Database connections, blobs, uploads, sockets between processes."""


def allow_files() -> None:
    """Let this process and its workers open as many files, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
