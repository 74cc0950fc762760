"""The status page: live charts of the server, drawn in the browser."""
