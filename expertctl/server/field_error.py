"""The error for a body with an invalid field."""

from expertctl.errors import UsageError


class FieldError(UsageError):
    """A field of a request is wrong; ``field`` is its path, such as ``messages[0].role``."""

    def __init__(self, message: str, *, field: str, hint: str = "") -> None:
        """Keep the message and the path; an empty one is the body itself."""
        super().__init__(message, hint=hint)
        self.field = field
