"""See the package above."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
