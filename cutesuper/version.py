"""The version of the package; exports and stored schedules name it."""

__version__ = "0.2.0"
