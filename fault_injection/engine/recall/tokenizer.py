"""Characters to token ids and back: one token a character, plus a start token and a separator."""

from collections.abc import Iterable

BOS_ID = 0
SEP_ID = 1
_FIRST_CHARACTER = 32
_LAST_CHARACTER = 126
_FIRST_CHARACTER_ID = 2
VOCAB_SIZE = _FIRST_CHARACTER_ID + _LAST_CHARACTER - _FIRST_CHARACTER + 1
"""97: the start token, the newline, and the 95 printable ASCII characters."""


def encode(text: str) -> list[int]:
    """Return the prompt for `text`: the start token, then one id a character; a newline is the separator.

    Raises:
        ValueError: a character is neither a newline nor printable ASCII (codes 32 to 126).
    """
    ids = [BOS_ID]
    for index, character in enumerate(text):
        if character == "\n":
            ids.append(SEP_ID)
        elif _FIRST_CHARACTER <= ord(character) <= _LAST_CHARACTER:
            ids.append(ord(character) - _FIRST_CHARACTER + _FIRST_CHARACTER_ID)
        else:
            raise ValueError(
                f"character {character!r} at index {index} is outside the recall vocabulary "
                "(newline and printable ASCII, codes 32 to 126)"
            )
    return ids


def decode(ids: Iterable[int]) -> str:
    """Return the text of `ids`; start tokens are dropped wherever they stand.

    Raises:
        ValueError: an id is not in [0, VOCAB_SIZE).
    """
    characters: list[str] = []
    for token_id in ids:
        if not 0 <= token_id < VOCAB_SIZE:
            raise ValueError(f"token id {token_id} is outside [0, {VOCAB_SIZE})")
        if token_id == SEP_ID:
            characters.append("\n")
        elif token_id != BOS_ID:
            characters.append(chr(token_id - _FIRST_CHARACTER_ID + _FIRST_CHARACTER))
    return "".join(characters)
