"""Exported programs (being written)."""


def load(path: str) -> object:
    """Not there yet."""
    raise NotImplementedError(path)
