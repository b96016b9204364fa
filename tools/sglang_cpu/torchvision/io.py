"""Images are not decoded here."""

from enum import Enum
from typing import Any


class ImageReadMode(Enum):
    """The one mode that SGLang names."""

    RGB = 3


def decode_image(*_: Any, **__: Any) -> Any:
    """Not here."""
    raise RuntimeError("this environment has no torchvision: images cannot be decoded")
