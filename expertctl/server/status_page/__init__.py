"""The status page: a browser draws what the server does now, from numbers that it asks for."""
