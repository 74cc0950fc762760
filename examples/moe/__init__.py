"""A small base of routed experts, trained on the text of the starter pack."""
