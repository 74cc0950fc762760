"""Messages as the Anthropic API has them: requests, answers and streams, and how long they are."""
