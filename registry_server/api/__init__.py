"""``/api/v1``: people, rights, packages, and its description in OpenAPI 3.1."""
