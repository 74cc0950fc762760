"""Continuous batching: many jobs on one base at a time, each row with its own plan."""
