"""What a chat tells of an error besides what a run does: what was said takes memory, too."""

from typing import TYPE_CHECKING

from expertctl.cli.misnamed import explained
from expertctl.errors import BudgetError, ExpertError

if TYPE_CHECKING:
    from expertctl.engine.conversation import Conversation

_WAY_OUT = "/reset forgets what was said, which takes memory, too"


def refused(error: ExpertError, conversation: "Conversation") -> ExpertError:
    """Return an error with what a person who is in a chat can do."""
    told = explained(error)
    if type(told) is BudgetError and conversation.turns:  # not of a full disk, or a large file
        return BudgetError(told.message, hint="; ".join(filter(None, (told.hint, _WAY_OUT))))
    return told
