"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# Hypothesis would take an example that is slow on a busy machine for a failure. All else stays as the profile in force has
# it, which on a machine of continuous integration is another one.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")
