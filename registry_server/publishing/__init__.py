"""From a pushed package to a version in a signed index document."""
