"""The status page: what the server does now, drawn by a browser from the numbers of one address."""
