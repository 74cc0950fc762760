"""The messages of the Anthropic API: requests, answers, streams, and their length in tokens."""
