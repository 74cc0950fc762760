"""The text of a conversation: how long it may be, and what experts are chosen by."""

from collections.abc import Sequence

from expertctl.engine.message import Message
from expertctl.routing.presets import MAX_PROMPT_CHARACTERS
from expertctl.server.field_error import FieldError


def check_length(messages: Sequence[Message]) -> None:
    """Bound a conversation.

    Raises:
        FieldError: when it is too long.
    """
    size = sum(len(message.content) for message in messages)
    if size > MAX_PROMPT_CHARACTERS:
        raise FieldError(
            f"messages: they have {size} characters, at most {MAX_PROMPT_CHARACTERS} are allowed",
            field="messages",
            hint="leave out the oldest ones",
        )


def routed_by(messages: Sequence[Message]) -> str:
    """Return the text that experts are chosen by: the user's last one, else the last of all.

    Raises:
        FieldError: when there is no text.
    """
    texts = [message for message in messages if message.content.strip()]
    if not texts:
        raise FieldError("messages: none of them has any text", field="messages")
    said = [message for message in texts if message.role == "user"]
    return (said or texts)[-1].content
