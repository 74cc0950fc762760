"""The generation server: HTTP in front of `expertctl.engine.serving`."""
