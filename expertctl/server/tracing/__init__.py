"""Traces for OpenTelemetry, if they are asked for: spans of requests, jobs and stages."""
