"""Which parts of a prompt are addressed to the router, or to whatever dispatches it, not the model.

A sentence counts when it gives an order (use, ignore, send) about something that only a router
knows of (a router, an expert, an adapter), in any of several languages; or when it plays a role
other than the user's. "Choose an expert plumber" counts as an order too though it is none, so the
caller must keep a prompt of which nothing would remain.
"""

import re

_THINGS = (
    r"(?:router|routers|routing|rout(?:eur|age)|enrutador|enrutamiento|roteador|roteamento|"
    r"dispatcher|expert(?:s|e|en|o|os|a|as)?|esperto|especialista|spezialist(?:en)?|"
    r"adapters?|adaptateur|adaptador|lora|experts?-?(?:id|name))"
)
_VERBS = (
    r"(?:use|choose|select|pick|prefer|force|load|activate|invoke|run|take|route|forward|send|hand|"
    r"switch|dispatch|delegate|assign|answer|respond|reply|go|ignore|disregard|bypass|override|"
    r"forget|skip|must|always|only|never|ignorier\w*|nimm|nehm\w*|verwend\w*|benutz\w*|nutz\w*|"
    r"w\u00e4hl\w*|leite\w*|ignor(?:ez|a|ar|e)|utilis\w*|utiliz\w*|choisi\w*|pren(?:ez|ds)|usa|usar|"
    r"usez|elige|elija|escoge|escolh\w*|scegli\w*|seleccion\w*|selecion\w*|seleziona)"
)
_NEAR = r"[^.!?\n]{0,80}?"
_ORDER = re.compile(
    rf"\b{_VERBS}\b{_NEAR}\b{_THINGS}\b|\b{_THINGS}\b{_NEAR}\b{_VERBS}\b"
    r"|\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:previous|prior|above|earlier|all)\b.{0,24}"
    r"\b(?:instructions?|rules?|prompts?)\b"
    r"|\b(?:selected|chosen|right|correct|best|only) (?:expert|adapter)\b"
    r"|\u8def\u7531|\u4e13\u5bb6|\u5c08\u5bb6"
    r"|\u043c\u0430\u0440\u0448\u0440\u0443\u0442\u0438\u0437|\u044d\u043a\u0441\u043f\u0435\u0440\u0442",
    re.IGNORECASE,
)
_STEMS = (
    *(
        "rout",
        "rotea",
        "enrut",
        "dispatch",
        "expert",
        "espert",
        "espec",
        "spezial",
        "adapt",
        "lora",
    ),
    *("instruction", "rule", "prompt", "\u8def\u7531", "\u4e13\u5bb6", "\u5c08\u5bb6"),
    *("\u043c\u0430\u0440\u0448\u0440\u0443\u0442", "\u044d\u043a\u0441\u043f\u0435\u0440\u0442"),
)
"""Every order contains one of these; most prompts contain none and need no further check."""
_STANDS = 2
"""At least this many spaces in the text before an order make that text a request of its own."""
_OPTION = re.compile(r"(?<!\S)--(?:expert|exclude|max-experts|no-experts|base|plan)\b[= ]?\S*")
_COMMENT = re.compile(r"<!--.*?(?:-->|$)|/\*.*?(?:\*/|$)", re.DOTALL)
_MATTER = re.compile(r"\A\s*---\n(?:[\w -]{1,40}:[^\n]*\n){1,20}---(?:\n|\Z)")
_SYSTEM = re.compile(
    r"<\|(?:im_start\|>\s*)?system(?:\|>)?.*?(?=<\|)|<<SYS>>.*?(?:<</SYS>>|$)"
    r"|^[ \t]*#{0,6}[ \t]*\**(?:system|developer|assistant|router|dispatcher)\**[ \t]*:"
    r"(?:[ \t]*\n)?[^\n]*"
    r"|^[ \t]*\{[^\n]{0,400}[\"']role[\"'][^\n]*\}[ \t]*$",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
_MARKER = re.compile(
    r"<\|[\w ]{1,32}\|>|\[/?INST\]|<</?SYS>>|</?(?:system|user|assistant|s)>"
    r"|^[ \t]*#{0,6}[ \t]*\**(?:user|human)\**[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_LABELLED = re.compile(
    r"(?:^|(?<=[.!?;(\n] )|(?<=[(\n]))(?:key ?words?|tags?|topics?|labels?|category|categories|"
    r"subjects?|intents?)\s*[:=][^.!?\n)]*[.!?)]?",
    re.IGNORECASE,
)
_TAG = re.compile(r"(?<!\S)[#@](?:[A-Za-z][\w/@.-]*|(?!\S))")


def without_roles(text: str) -> str:
    """Leave out text in a role other than the user's, and comments that are not displayed."""
    if "---\n" in text:
        text = _MATTER.sub("\n", text)
    if "<!--" in text or "/*" in text:
        text = _COMMENT.sub(" ", text)
    return _MARKER.sub(" ", _SYSTEM.sub("\n", text))


def without_labels(text: str) -> str:
    """Leave out labelled keywords, tags, mentions, and options of our own command."""
    return _TAG.sub(" ", _OPTION.sub(" ", _LABELLED.sub(" ", text)))


def is_order(sentence: str) -> bool:
    """Tell whether a sentence tells a router what to do."""
    return _order_in(sentence) is not None


def without_order(sentence: str) -> str:
    """Return the part of a sentence that is no order to a router; empty where none stands apart."""
    found = _order_in(sentence)
    if found is None:
        return sentence
    before, order = sentence[: found.start()], sentence[found.start() :]
    if before.count(" ") >= _STANDS and order[0].isupper():
        return before  # two sentences without a stop between them
    told, _, rest = sentence.partition(": ")
    return rest if rest and is_order(told) and not is_order(rest) else ""


def _order_in(sentence: str) -> re.Match[str] | None:
    spelled = sentence.casefold()
    return _ORDER.search(sentence) if any(stem in spelled for stem in _STEMS) else None
