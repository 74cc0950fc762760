"""The OCI distribution specification v1.1 under ``/v2/``."""
