"""The registry server: publishes, keeps and serves expert packages, and plain OCI artifacts."""
