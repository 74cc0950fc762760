"""The calls of OpenAI's API: chat completions, completions, models."""
