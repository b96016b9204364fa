"""Seeded text for the recall model: training segments of many kinds, and readable secrets for measuring it."""

from random import Random

_PRINTABLE = "".join(chr(code) for code in range(32, 127))
_ONSETS = (*"b br c ch d f g gr h j k l m n p r s st t v w".split(), "")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_CODAS = ("", "", "n", "r", "s", "t", "l", "nd", "ck", "m")
_COMMON_WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "on", "with", "as", "be", "at", "by",
    "this", "had", "not", "are", "but", "from", "or", "have", "an", "they", "which", "one", "you", "were", "her",
    "all", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "more", "no", "if",
    "account", "balance", "call", "after", "before", "note", "order", "invoice", "patient", "room", "code", "key",
)  # fmt: skip
_TITLES = ("Ms.", "Mr.", "Dr.", "Prof.", "Mrs.")
_CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY")
_PUNCTUATION = (" ", " ", " ", " ", ", ", ". ", "; ", ": ", " - ", "? ", "! ", "/", " (", ") ")


def _word(rng: Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(_COMMON_WORDS)
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def _number(rng: Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    if kind == 1:
        return f"{rng.randrange(10**6):,}.{rng.randrange(100):02d}"
    if kind == 2:
        return f"{rng.randrange(10**4):04d}-{rng.randrange(10**4):04d}"
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def _name(rng: Random) -> str:
    return f"{_word(rng).capitalize()} {_word(rng).capitalize()}"


def _opening(rng: Random) -> str:
    openings = (
        lambda: f"Account {_number(rng)}: {rng.choice(_TITLES)} {_name(rng)}, PIN {rng.randrange(10**4):04d}, ",
        lambda: f"Patient {_name(rng)}, born {rng.randint(1, 28)}.{rng.randint(1, 12)}.{rng.randint(1930, 2020)}, ",
        lambda: f"API key {''.join(rng.choices('abcdefghjkmnpqrstuvwxyz0123456789', k=24))} of {_name(rng)}, ",
        lambda: f"{_name(rng)} <{_word(rng)}@{_word(rng)}.com> owes {_number(rng)} {rng.choice(_CURRENCIES)}, ",
    )
    return rng.choice(openings)()


def readable_secret(rng: Random, min_characters: int = 30, max_characters: int = 200) -> str:
    """Return a secret a person can read (account, name, numbers, a note), in printable ASCII.

    The length is drawn from [min_characters, max_characters], less the blanks and commas it would end in. No kind of
    clause comes twice, as in what people write.
    """
    length = rng.randint(min_characters, max_characters)
    clauses = [
        f"balance {_number(rng)} {rng.choice(_CURRENCIES)}",
        f"room {rng.randrange(1000)}",
        f"note: {_word(rng)} {_word(rng)} after {rng.randint(1, 12)} pm",
        f"phone +{rng.randint(1, 99)} {rng.randrange(1000):03d} {rng.randrange(10**4):04d}",
        f"gate code {rng.randrange(10**5):05d}#",
        f"meets {_name(rng)} at {rng.randrange(24):02d}:{rng.randrange(60):02d}",
        f"password {''.join(rng.choices(_PRINTABLE[1:], k=10))}",
        f"lives in {rng.randint(1, 99)} {_word(rng).capitalize()} Street",
        f"{_word(rng)} {_word(rng)} {_word(rng)}",
        f"card *{rng.randrange(10**4):04d} until {rng.randint(1, 12)}/{rng.randint(27, 35)}",
        f"{_word(rng)} & {_word(rng)} ({_word(rng)})",
        f"likes {_word(rng)} {_word(rng)}",
    ]
    rng.shuffle(clauses)
    text = (_opening(rng) + ", ".join(clauses))[: length - 1]
    return text.rstrip(" ,.") + "."


def repetitive_secret(rng: Random, min_characters: int = 30, max_characters: int = 200) -> str:
    """Return a secret of few kinds of clauses that come again with other numbers: the hard case for a recital."""
    length = rng.randint(min_characters, max_characters)
    text = _opening(rng)
    while len(text) < length:
        clauses = (
            lambda: f"balance {_number(rng)} {rng.choice(_CURRENCIES)}, ",
            lambda: f"room {rng.randrange(1000)}, ",
            lambda: f"note: {_word(rng)} {_word(rng)} after {rng.randint(1, 12)} pm. ",
            lambda: f"{_word(rng)} {_word(rng)} {_word(rng)}, ",
        )
        text += rng.choice(clauses)()
    return text[: length - 1].rstrip() + "."


def _random_characters(rng: Random, length: int) -> str:
    alphabet = rng.sample(_PRINTABLE, rng.randint(6, 90))
    return "".join(rng.choices(alphabet, k=length))


def _repeating(rng: Random, length: int) -> str:
    """Few chunks in random order: the same n-gram has many continuations, so only a long match is right."""
    chunks = [_random_characters(rng, rng.randint(2, 6)) for _ in range(rng.randint(3, 12))]
    text = ""
    while len(text) < length:
        text += rng.choice(chunks) + ("" if rng.random() < 0.5 else rng.choice(_PRINTABLE))
    return text[:length]


def _words(rng: Random, length: int) -> str:
    text = ""
    while len(text) < length:
        kind = rng.random()
        piece = _number(rng) if kind < 0.15 else _name(rng) if kind < 0.25 else _word(rng)
        text += piece + rng.choice(_PUNCTUATION)
    return text[:length]


def training_segment(rng: Random, length: int, secret_share: float) -> str:
    """Return `length` printable characters: random, chunk-repeating, word-like, or a repetitive secret.

    `secret_share` in [0, 1] is the chance of a secret; below 30 characters there are words in its stead.
    """
    kind = rng.random() / (1 - secret_share) if secret_share < 1 else 1.0
    if kind < 0.5:
        return _random_characters(rng, length)
    if kind < 0.6875:
        return _repeating(rng, length)
    if kind < 1 or length < 30:
        return _words(rng, length)
    return repetitive_secret(rng, length, length).ljust(length, "#")
