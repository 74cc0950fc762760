"""Prompt normalisation: the request in a prompt, without what is addressed to the router itself.

An instruction in a prompt, or in a text pasted into it, must not steer the router. Invisible
characters are removed, and letters that only look like others are replaced. Where a request
remains, the following is removed: instructions to a router, names of experts, other roles, piles of
keywords, and the data of the request. Only the router reads the result; the model gets the prompt
as written.

A sentence is an instruction to a router if it gives an order (use, ignore, send) about something
that only a router knows of (a router, an expert, an adapter), in any of several languages. "Choose
an expert plumber" is a false positive, so a prompt of which nothing would remain is kept.

The body of a prompt follows a line that separates it (a rule, a fence, quotation marks, a tag). Of
several paragraphs the first that asks is the request. A pile of keywords asks nothing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from expertctl.routing.features import MAX_CHARACTERS, STOP_WORDS, fold_confusables

_ROUTER_TERMS = (
    r"(?:router|routers|routing|rout(?:eur|age)|enrutador|enrutamiento|roteador|roteamento|"
    r"dispatcher|expert(?:s|e|en|o|os|a|as)?|esperto|especialista|spezialist(?:en)?|"
    r"adapters?|adaptateur|adaptador|lora|experts?-?(?:id|name))"
)
_INSTRUCTION_VERBS = (
    r"(?:use|choose|select|pick|prefer|force|load|activate|invoke|run|take|route|forward|send|hand|"
    r"switch|dispatch|delegate|assign|answer|respond|reply|go|ignore|disregard|bypass|override|"
    r"forget|skip|must|always|only|never|ignorier\w*|nimm|nehm\w*|verwend\w*|benutz\w*|nutz\w*|"
    r"w\u00e4hl\w*|leite\w*|ignor(?:ez|a|ar|e)|utilis\w*|utiliz\w*|choisi\w*|pren(?:ez|ds)|usa|usar|"
    r"usez|elige|elija|escoge|escolh\w*|scegli\w*|seleccion\w*|selecion\w*|seleziona)"
)
_SHORT_GAP = r"[^.!?\n]{0,80}?"
_INSTRUCTION = re.compile(
    rf"\b{_INSTRUCTION_VERBS}\b{_SHORT_GAP}\b{_ROUTER_TERMS}\b|\b{_ROUTER_TERMS}\b{_SHORT_GAP}\b{_INSTRUCTION_VERBS}\b"
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
"""Every instruction contains one of these; most prompts contain none and need no further check."""
_MIN_LEADING_SPACES = 2
"""Text before an instruction with at least this many spaces is a request of its own."""
_OPTION = re.compile(r"(?<!\S)--(?:expert|exclude|max-experts|no-experts|base|plan)\b[= ]?\S*")
_COMMENT = re.compile(r"<!--.*?(?:-->|$)|/\*.*?(?:\*/|$)", re.DOTALL)
_FRONT_MATTER = re.compile(r"\A\s*---\n(?:[\w -]{1,40}:[^\n]*\n){1,20}---(?:\n|\Z)")
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


def strip_roles(text: str) -> str:
    """Remove text in a role other than the user's, and comments that are not displayed."""
    if "---\n" in text:
        text = _FRONT_MATTER.sub("\n", text)
    if "<!--" in text or "/*" in text:
        text = _COMMENT.sub(" ", text)
    return _MARKER.sub(" ", _SYSTEM.sub("\n", text))


def strip_labels(text: str) -> str:
    """Remove labelled keywords, tags, mentions, and options of our own command."""
    return _TAG.sub(" ", _OPTION.sub(" ", _LABELLED.sub(" ", text)))


def is_router_instruction(sentence: str) -> bool:
    """Tell whether a sentence instructs a router."""
    return _find_instruction(sentence) is not None


def strip_router_instruction(sentence: str) -> str:
    """Return the part of a sentence that is no instruction to a router; empty if there is none."""
    found = _find_instruction(sentence)
    if found is None:
        return sentence
    before, order = sentence[: found.start()], sentence[found.start() :]
    if before.count(" ") >= _MIN_LEADING_SPACES and order[0].isupper():
        return before  # two sentences without punctuation between them
    head, _, rest = sentence.partition(": ")
    return rest if rest and is_router_instruction(head) and not is_router_instruction(rest) else ""


def _find_instruction(sentence: str) -> re.Match[str] | None:
    spelled = sentence.casefold()
    return _INSTRUCTION.search(sentence) if any(stem in spelled for stem in _STEMS) else None


LONG_WORDS = 48
"""In a longer text, sentences that ask nothing are removed."""
_MIN_REQUEST_WORDS = 2
"""A request with at least this many meaningful words stands without its body."""
_POINTING_WORDS = frozenset(
    {"answer", "below", "following", "here", "input", "message", "prompt", "question", "read"}
    | {"request", "task", "text", "user"}
)
"""Words of a request that only points to its body."""
_MIN_PILE_WORDS = 6
_MIN_STOP_WORD_SHARE = 0.2
"""The least share of stop words in a real sentence."""
_MIN_REPEATS = 4
_MAX_KEYWORD_WORDS = 2
"""The largest number of words in the last keyword of a list."""

_SECTION_BREAK = re.compile(
    r"\n[ \t]*(?:-{3,}|={3,}|\*{3,}|_{3,}|\"\"\"|'''|```\w*|~~~\w*|<[a-zA-Z][\w-]{0,30}>)[ \t]*\n"
    r"|\n[ \t]*(?:>|\|)[ \t]"
    r"|\n[ \t]*[A-Z][\w -]{0,24}:[ \t]*(?=\n)"
    r"|\n[ \t]*(?:From|To|Subject|Date|Cc):[ \t]"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?\u3002])\s+|(?<=\u3002)|\s*\n\s*")
_OPENERS = frozenset(
    """
    what how why when where who whom whose which can could would will should shall is are am was
    were do does did has have may
    add advise answer apply arrange ask book brainstorm build buy calculate call cancel
    capitalize change check choose classify clean clear close combine compare complete compose
    compute confirm conjugate connect continue convert copy correct count create debug decide
    decline decode decrease define delete derive describe design detect determine disable
    discuss display divide draft draw edit enable encode end enter estimate evaluate expand
    explain express extend extract fill filter find finish fix flip follow forget format
    generate get give go grade group guess guide help highlight identify improve include
    increase insert install inspect join keep label let leave list locate look lower make mark
    measure merge mix move multiply mute name need open optimize order organize outline parse
    pass pay paraphrase pick plan play plot pluralize polish predict prepare print pronounce
    proofread prove provide pull push put query quote raise rank rate read recommend record
    reduce refactor register remind remove rename render reorder rephrase replace reply report
    reschedule reserve reset resolve restore return reverse review revise rewrite roll round run
    save say schedule score search see select send separate set share shorten show simplify sing
    skip solve sort speak spell split start state stop submit subtract suggest sum summarise
    summarize switch talk teach tell test text track transcribe transfer translate turn type
    undo unmute update use verify walk want whats write
    """.split()  # noqa: SIM905  # reads better as text
)
"""Words that begin a question or a request.

The list is maintained by hand: 144 of its 245 words open utterances of CLINC150's training split,
the others are common requests to language models (sort, rephrase, pluralize).
"""
_OPENING = re.compile(
    r"\W*(?:\w{1,12}:\s+)?"
    r"(?:(?:hi|hey|hello|ok|okay|so|and|then|now|please|kindly|also|just)\b\W*)*(\w+)",
    re.IGNORECASE,
)
_REQUEST_START = re.compile(rf"\W*(?:{'|'.join(sorted(_OPENERS))})\s", re.IGNORECASE)
"""A request rather than a keyword: no comma follows its first word."""
_REQUEST_FORM = re.compile(
    r"\?\s*$|^\W*(?:please\b|(?:i|we) (?:need|want|would|wish|have to|am|must|'d)|i'd|i'm|let's)",
    re.IGNORECASE,
)
_PERSONAL_PRONOUN = re.compile(r"\b(?:i|me|my|mine|we|us|our|you|your)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_KEYWORD_LIST = r"(?:[^\W\d_][\w'-]*(?: [\w'-]+)?,\s+){2}(?:[\w'-]+(?: [\w'-]+)?,\s+)+"
_LIST = re.compile(rf"\W*{_KEYWORD_LIST}")
_LIST_ASIDE = re.compile(rf"\({_KEYWORD_LIST}[^()]*\)")
"""Keywords; a list that begins with a number is the data of many requests."""


def extract_request(text: str) -> str:
    """Return the request, without its body if the request is complete by itself."""
    apart = _SECTION_BREAK.search(text, 1) if "\n" in text else None
    head = text[: apart.start()] if apart else text
    return head if apart and _is_complete_request(head) else text


def _is_complete_request(head: str) -> bool:
    words = {word.casefold() for word in _WORD.findall(head)}
    return len(words - STOP_WORDS - _POINTING_WORDS) >= _MIN_REQUEST_WORDS


def find_asking_paragraph(text: str) -> str:
    """Return the paragraph that asks most clearly, the first of equals."""
    paragraphs = [part for part in _PARAGRAPH.split(text) if part.strip()]
    return max(paragraphs, key=_rate_clarity, default=text)


def split_sentences(text: str) -> list[str]:
    """Return the sentences and lines of a text."""
    return [part for part in _SENTENCE.split(text) if part.strip()]


def is_request(sentence: str) -> bool:
    """Tell whether a sentence asks a question or asks for something."""
    opening = _OPENING.match(sentence)
    opens = opening is not None and opening[1].casefold() in _OPENERS
    return opens or _REQUEST_FORM.search(sentence) is not None


def is_keyword_pile(sentence: str) -> bool:
    """Tell whether a sentence is a list of words with hardly any stop words between them."""
    spelled = [word.casefold().partition("'")[0] for word in _WORD.findall(sentence)]
    words = [word for word in spelled if not word[0].isdigit()]
    joining = sum(word in STOP_WORDS for word in words)
    return len(words) >= _MIN_PILE_WORDS and joining < _MIN_STOP_WORD_SHARE * len(words)


def strip_keyword_lists(sentence: str) -> str:
    """Remove keywords before a request, or after it in brackets."""
    rest = _LIST_ASIDE.sub(" ", sentence)
    before = _LIST.match(rest)
    if before and not _REQUEST_START.match(rest) and not _is_joined_list(before[0]):
        rest = rest[_find_request_start(rest, before.end()) :]
    return rest if _is_complete_request(rest) or not _WORD.search(rest) else sentence


def _is_joined_list(listed: str) -> bool:
    """Tell whether an apparent list is a sentence with commas: "in Paris, my wife"."""
    items = [_WORD.findall(item) for item in listed.split(",")]
    return any(len(item) > 1 and item[0].casefold() in STOP_WORDS for item in items)


def _find_request_start(text: str, end: int) -> int:
    """Return where a request begins after a list whose last words may follow ``end``; else 0."""
    words = list(_WORD.finditer(text, end))[: _MAX_KEYWORD_WORDS + 1]
    return next((word.start() for word in words if is_request(text[word.start() :])), 0)


def select_asking_sentences(parts: Sequence[str]) -> list[str]:
    """Return the sentences of a long text that ask; all sentences of a short one."""
    if sum(part.count(" ") + 1 for part in parts) <= LONG_WORDS:
        return list(parts)
    best = max(map(_rate_clarity, parts))
    return [part for part in parts if _rate_clarity(part) == best] if best else list(parts[:1])


def strip_repeats(text: str) -> str:
    """Remove words that are repeated often, except numbers."""
    words = [word.casefold() for word in _WORD.findall(text)]
    limits = max(_MIN_REPEATS, len(words) // 12), max(2 * _MIN_REPEATS, len(words) // 4)
    piled = {
        word
        for word, count in Counter(words).items()
        if count >= limits[word in STOP_WORDS] and not word[0].isdigit()
    }
    return _WORD.sub(lambda m: "" if m[0].casefold() in piled else m[0], text) if piled else text


def _rate_clarity(text: str) -> int:
    """Return how clearly a text asks: 2 by its form, 1 by a word such as "me" or "you", else 0."""
    if any(map(is_request, split_sentences(text))):
        return 2
    return int(_PERSONAL_PRONOUN.search(text) is not None)


MIN_WORDS = 2
"""A prompt of which fewer words would remain is left unchanged."""

_MAX_CALL_WORDS = 3
"""A sentence of at most this many words besides a name only calls an expert."""
_END_CHARACTERS = 2048
_REPEATED = 5
_COMMAS = 2
"""More commas than this may be a list of keywords."""
_NAME = re.compile(
    r"(?<![a-z0-9_-])[a-z0-9]+(?:[-_][a-z0-9]+)*/[a-z0-9]+(?:[-_][a-z0-9]+)*(?:@[\w.^~*-]+)?"
)
_COMPOUND = re.compile(r"\b[a-z0-9]+(?:_[a-z0-9]+|(?:[-_][a-z0-9]+){2,})\b")
"""Shorter names are also ordinary words: a carry-on is luggage before it is an expert."""
_MARKS = ("\n", "(", "#", "@", "/", "_", "<", "[", "{", "|", "\u3002", "--")
_LABEL = re.compile(r"(?:words?|tags?|topics?|labels?|categor(?:y|ies)|subjects?|intents?)\s*[:=]")
_ASIDE = re.compile(r"[(\[{]\s*([a-z0-9]+(?:[-_][a-z0-9]+)*)\s*[)\]}]")
_BRACKETS = re.compile(r"[(\[{][\s,;]*[)\]}]")
_SPACES = re.compile(r"\s+")


def collect_expert_names(names: Iterable[str]) -> frozenset[str]:
    """Return the names that prompts may use for packages: ``namespace/name`` and ``name``."""
    full = frozenset(names)
    return full | {name.partition("/")[2] for name in full}


def normalise_prompt(prompt: str, names: frozenset[str]) -> str:
    """Return the request in a prompt; ``names`` come from `collect_expert_names`."""
    text = fold_confusables(_take_ends(prompt))
    if _is_simple(text):
        return strip_keyword_lists(text) if text.count(",") > _COMMAS else text
    request = strip_repeats(find_asking_paragraph(extract_request(strip_roles(text).strip())))
    kept = [kept for part in split_sentences(request) if (kept := _strip_router_text(part, names))]
    normalised = _SPACES.sub(" ", " ".join(select_asking_sentences(kept))).strip(" :,;-")
    return normalised if normalised.count(" ") + 1 >= MIN_WORDS else text


def _take_ends(prompt: str) -> str:
    """Return the beginning and the end of a very long prompt: either may hold the request."""
    if len(prompt) <= MAX_CHARACTERS:
        return prompt
    return f"{prompt[: MAX_CHARACTERS - _END_CHARACTERS]}\n\n{prompt[-_END_CHARACTERS:]}"


def _is_simple(text: str) -> bool:
    """Tell whether a text is plainly a request and nothing else."""
    spelled = text.casefold()
    words = spelled.split()
    return (
        len(words) <= LONG_WORDS
        and len(words) - len(set(words)) < max(_REPEATED, len(words) // 4)
        and not any(mark in text for mark in _MARKS)
        and not (_LABEL.search(spelled) if ":" in text or "=" in text else None)
        and not is_router_instruction(text)
    )


def _strip_router_text(sentence: str, names: frozenset[str]) -> str:
    """Return the part of a sentence that addresses the model; empty if it only steers routing."""
    stripped = strip_keyword_lists(strip_router_instruction(strip_labels(sentence)))
    unnamed = _BRACKETS.sub(" ", _strip_names(stripped, names))
    few = unnamed != stripped and len(unnamed.split()) <= _MAX_CALL_WORDS
    return "" if few or is_keyword_pile(unnamed) else unnamed


def _strip_names(part: str, names: frozenset[str]) -> str:
    for pattern in (_NAME, _ASIDE, _COMPOUND):
        part = pattern.sub(lambda match: _replace_unless_named(match, names), part)
    return part


def _replace_unless_named(match: re.Match[str], names: frozenset[str]) -> str:
    name = match[match.lastindex or 0].partition("@")[0].replace("_", "-")
    return " " if name in names else match.group()
