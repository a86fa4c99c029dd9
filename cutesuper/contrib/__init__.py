"""Formats of other projects."""
