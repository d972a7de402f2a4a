"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Other tests and builds may share the machine, so a slow example is no failure.
settings.register_profile("phub", deadline=None)
settings.load_profile("phub")
