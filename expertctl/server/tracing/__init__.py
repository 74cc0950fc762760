"""Traces for OpenTelemetry, where they are asked for: spans of requests, jobs and their stages."""
