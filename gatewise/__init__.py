"""LSTMs at the speed of the hardware."""

from gatewise._version import __version__

__all__ = ["__version__"]
