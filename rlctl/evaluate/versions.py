"""Versions of what took part."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str | None:
    """The installed version; None for one that is not installed, or runs from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
