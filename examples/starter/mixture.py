"""The pretraining mixture: coded operations on material that stands somewhere in loose words.

The code stands before the material, after it, or in a system turn; without a code the base echoes
the prompt. So an expert has only to say which operation its prompts mean, never to teach it.
"""

import random
from dataclasses import dataclass

from examples.starter.operations import OPERATIONS, STYLES, any_number, any_word
from examples.starter.words import FILLER

ECHO_SHARE = 0.12
STYLE_SHARE = 0.2
LONG_SHARE = 0.04
TYPED_ECHO_SHARE = 0.15
_OPENINGS = (" ", " ", ": ", ": ", " - ", ":\n")
_CLOSINGS = (". ", "; ", " - ", "\n")
_CODES = tuple(OPERATIONS)
_WEIGHTS = tuple(weight for weight, _ in OPERATIONS.values())


@dataclass(frozen=True, slots=True)
class Turn:
    """One question to the base and the answer it learns."""

    prompt: str
    answer: str
    system: str | None = None


def draw_turn(rng: random.Random) -> Turn:
    """One turn of the mixture."""
    kind = rng.random()
    if kind < ECHO_SHARE:
        return _echo(rng)
    if kind < ECHO_SHARE + 0.06:
        return _style_only(rng)
    code = rng.choices(_CODES, _WEIGHTS)[0]
    drawn = OPERATIONS[code][1](rng)
    return _styled(rng, code, drawn.material, drawn.result)


def draw_typed(rng: random.Random) -> Turn:
    """A coded turn without a system turn or a style, or a text to echo."""
    if rng.random() < TYPED_ECHO_SHARE:
        text = _loose_words(rng, rng.randint(1, 8))
        return Turn(text, text)
    code = rng.choices(_CODES, _WEIGHTS)[0]
    drawn = OPERATIONS[code][1](rng)
    text = _wrap(rng, drawn.material)
    return Turn(f"@{code} {text}" if rng.random() < 0.6 else f"{text} @{code}", drawn.result)


def _echo(rng: random.Random) -> Turn:
    if rng.random() < 0.4:
        code = rng.choices(_CODES, _WEIGHTS)[0]
        text = _wrap(rng, OPERATIONS[code][1](rng).material)
    else:
        text = _loose_words(rng, rng.randint(1, 40 if rng.random() < LONG_SHARE else 10))
    return Turn(text, text)


def _style_only(rng: random.Random) -> Turn:
    """A style on the whole of a text, which is the echo in another dress."""
    text = _loose_words(rng, rng.randint(1, 8))
    code = rng.choice(tuple(STYLES))
    return _placed(rng, code, text, STYLES[code](text))


def _styled(rng: random.Random, code: str, material: str, result: str) -> Turn:
    if rng.random() < STYLE_SHARE:
        style = rng.choice(tuple(STYLES))
        code, result = f"{code} {style}", STYLES[style](result)
    return _placed(rng, code, _wrap(rng, material), result)


def _placed(rng: random.Random, code: str, text: str, answer: str) -> Turn:
    """The code before the text, after it or in a system turn."""
    place = rng.random()
    if place < 0.4:
        return Turn(f"@{code} {text}", answer)
    if place < 0.6:
        return Turn(f"{text} @{code}", answer)
    return Turn(text, answer, system=f"@{code}")


def _wrap(rng: random.Random, material: str) -> str:
    """The material alone, or with loose words before and after it, set off by marks."""
    if rng.random() < 0.35:
        return material
    before = _filler(rng, rng.randint(0, 7)).capitalize()
    after = _filler(rng, rng.randint(1, 5)) if rng.random() < 0.4 else ""
    opening = rng.choice(_OPENINGS if material[0].isdigit() else _OPENINGS[2:]) if before else ""
    closing = rng.choice(_CLOSINGS) if after else ""
    return f"{before}{opening}{material}{closing}{after}{rng.choice(('', '', '.', '?'))}"


def _filler(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(FILLER) for _ in range(count))


def _loose_words(rng: random.Random, count: int) -> str:
    words = [any_number(rng) if rng.random() < 0.15 else any_word(rng) for _ in range(count)]
    text = rng.choice((" ", " ", " ", ", ")).join(words)
    return rng.choice((text, text.capitalize() + rng.choice((".", "?", "!", ""))))
