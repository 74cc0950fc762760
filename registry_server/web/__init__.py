"""Pages for people: rendered here, read-only, without scripts."""
