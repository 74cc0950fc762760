"""What a chat shows: the line below an answer, the experts, the help."""

from typing import TYPE_CHECKING

from expertctl.cli.output import counted, table
from expertctl.cli.routed_view import loss_text

if TYPE_CHECKING:
    from expertctl.engine.conversation import Conversation, Turn
    from expertctl.routing.plan import Plan
    from expertctl.routing.planner import Planner

HELP = '''\
/experts              the installed experts that fit the base; * marks those that answer
/experts REF[:W] ...  let these answer from now on
/experts none         let the base answer alone from now on
/experts auto         choose them by each message again
/plan                 which experts answered the last message, and why
/plan FILE            save that plan, for `expertctl run --plan FILE`
/feedback good        say what the last answer was: good, or bad
/reset                forget what was said
/exit, /quit          leave, as the end of the input (Ctrl-D) does
A line that ends in \\ goes on in the next one; """ begins and ends a text of several lines.
Ctrl-C stops an answer. What was written of it stays in the conversation.'''


def turn_line(turn: "Turn") -> str:
    """Return a turn in one line: experts, how much was read, written and left out, how fast."""
    result, generated = turn.result, turn.result.generated
    ends = {"stop": "", "length": " (cut at the limit)", "cancelled": " (interrupted)"}
    parts = [
        who(turn.plan) + (", kept from the turn before" if turn.kept_experts else ""),
        f"{counted(result.prompt_tokens, 'token')} of prompt{_reused(turn)}",
        f"{len(generated.tokens) or 'nothing'} written{ends[generated.finish_reason]}",
    ]
    if generated.decode_steps:
        parts.append(f"{generated.tokens_per_s:.0f} tokens/s")
    parts += loss_text(result.moe)
    return f"  [{'; '.join(parts)}]"


def who(plan: "Plan") -> str:
    """Return the experts of a plan, with weights that are not 1, and its base."""
    named = (e.ref if e.weight == 1.0 else f"{e.ref} x {e.weight:g}" for e in plan.experts)
    experts = " + ".join(named)
    return f"{experts} on {plan.base}" if experts else f"{plan.base} alone"


def experts_text(conversation: "Conversation", planner: "Planner") -> str:
    """Return the installed experts that fit the base of a conversation."""
    from expertctl.routing.candidate import misfit

    name = conversation.base
    base = planner.bases.find(name) if name else planner.rule.default()
    if base is None:
        return "no base model is known that a chat can use"
    installed = planner.inventory().experts
    fitting = [e for e in installed if not misfit(e, base.identity, allow_mismatch=False)]
    rows = [
        [
            "*" if expert.digest in conversation.in_use else "",
            expert.stored.ref,
            expert.manifest.kind,
            expert.manifest.description,
        ]
        for expert in fitting
    ]
    others = len(installed) - len(fitting)
    lines = [table(["", "EXPERT", "KIND", "DESCRIPTION"], rows) if rows else "no expert fits"]
    lines += [f"{others} more, made for other bases than {base.name}"] if others else []
    return "\n".join(lines)


def _reused(turn: "Turn") -> str:
    """Say how much of the prompt was reused, or why none was if the experts changed."""
    reused = turn.result.kv_reused_tokens
    if reused:
        return f" ({reused} kept from before)"
    return " (all read again: the experts changed)" if turn.replanned else ""
