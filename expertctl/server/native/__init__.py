"""The native API: inference, background jobs, routing and installed experts."""
