"""From an adapter directory to a signed ``.expert`` file, and every strict reader on the way back."""
