"""Our own API: inference, jobs, routing and what is installed."""
