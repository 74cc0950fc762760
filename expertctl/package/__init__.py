"""From an adapter directory to a signed ``.expert`` file, and the strict readers back."""
