"""OpenTelemetry traces, if enabled: spans of requests, jobs and stages."""
