"""Running it: serving, health, metrics, logs, backup, garbage collection."""
