"""What a whole answer of each API is, and the text in it."""

from benchmarks.soak.request import Request

Document = dict[str, object]
ENDS = {"chat": "[DONE]", "completions": "[DONE]", "messages": "message_stop", "infer": "finished"}
"""The last data, or the name of the last event, of a stream."""
_REASONS = {
    "chat": {"stop", "length", "tool_calls"},
    "completions": {"stop", "length"},
    "messages": {"end_turn", "max_tokens", "stop_sequence", "tool_use"},
    "infer": {"stop", "length", "timeout"},
}


def problem_of(request: Request, answer: Document) -> str | None:
    """Return what is missing in an answer that came with status 200; None for nothing."""
    match request.api:
        case "chat" | "completions":
            return _of_choices(request, answer)
        case "messages":
            reason = answer.get("stop_reason")
        case "infer" | "jobs":
            reason = answer.get("finish_reason")
        case "route":
            return None if isinstance(answer.get("plan"), dict) else "no plan"
    known = _REASONS["messages" if request.api == "messages" else "infer"]
    return None if reason in known else f"it ended with {reason!r}"


def text_of(request: Request, answer: Document) -> str:
    """Return the text of an answer, the first one where there are several."""
    match request.api:
        case "chat":
            return _text(_at(answer, "choices", 0, "message", "content"))
        case "completions":
            return _text(_at(answer, "choices", 0, "text"))
        case "messages":
            return _text(_at(answer, "content", 0, "text"))
        case _:
            return _text(answer.get("text"))


def piece_of(request: Request, event: Document) -> str:
    """Return the text that one event of a stream adds to the first answer."""
    match request.api:
        case "chat":
            own = _at(event, "choices", 0, "index") == 0
            return _text(_at(event, "choices", 0, "delta", "content")) if own else ""
        case "completions":
            return _text(_at(event, "choices", 0, "text"))
        case "messages":
            return _text(_at(event, "delta", "text"))
        case _:
            return "" if "job_id" in event else _text(event.get("text"))


def error_of(document: Document) -> str | None:
    """Return the word and the sentence of an error, in whichever shape; None for no error."""
    error = document.get("error")
    if not isinstance(error, dict):
        return None
    return f"{error.get('code') or error.get('type')}: {error.get('message')}"


def _of_choices(request: Request, answer: Document) -> str | None:
    choices, usage = answer.get("choices"), answer.get("usage")
    if not isinstance(choices, list) or not isinstance(usage, dict):
        return "no choices, or no usage"
    if len(choices) != request.texts and not request.is_timed:
        return f"{len(choices)} choices of {request.texts}"
    reasons = {choice.get("finish_reason") for choice in choices}
    unknown = reasons - _REASONS[request.api]
    return f"it ended with {unknown}" if unknown else None


def _at(document: object, *path: str | int) -> object:
    for step in path:
        match document, step:
            case dict(), str():
                document = document.get(step)
            case list(), int() if step < len(document):
                document = document[step]
            case _:
                return None
    return document


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
