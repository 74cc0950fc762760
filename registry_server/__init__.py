"""The registry server: publishes, stores and serves expert packages, and plain OCI artifacts.

- ``access``: who makes a request, and what they may do.
- ``api``: users, rights and packages under ``/api/v1``, and its OpenAPI document.
- ``database``: tables, connections, and migrations, which alembic runs.
- ``oci``: the OCI distribution specification v1.1 under ``/v2/``.
- ``operation``: serving, health, metrics, backup and garbage collection.
- ``publishing``: from a pushed package to a version in a signed index document.
- ``web``: read-only pages, rendered on the server, without scripts.
"""
