"""What a chat tells of an error besides what a run does."""

from tests.cli.test_chat import OTHER, turns
from tests.cli.test_run import (
    PROMPT,
    QUIET,
    Expertctl,
    RunWorkspace,
    expertctl,
    made_once,
    workspace,
)

__all__ = ["expertctl", "made_once", "workspace"]


def test_a_chat_that_has_grown_beyond_its_memory_is_told_how_to_begin_anew(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    """Each turn has the prompt before and more; the budget has room for the first alone."""
    alone = expertctl("run", OTHER, "--no-experts", "--json", *QUIET).document["memory"]
    limit = ("--no-experts", "--memory-budget", str(alone["peak"] + 1024))
    said = f"{OTHER}\n{PROMPT}\n/reset\n{OTHER}\n{PROMPT}\n"
    first, refused, again, last = turns(expertctl, *limit, said=said, code=7)
    assert first["text"] == again["text"]
    assert first["tokens"]["prompt"] == again["tokens"]["prompt"]
    assert refused == last
    assert refused["error"]["code"] == "budget"
    assert refused["error"]["hint"].endswith(
        "/reset clears the conversation, which also takes memory"
    )
    at_first = turns(expertctl, *limit[:2], str(alone["peak"] - 1024), said=f"{OTHER}\n", code=7)
    assert "/reset" not in at_first[0]["error"]["hint"]
