"""For the pure tests: property tests that depend on no clock, as other work shares the cores."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("enforcer", deadline=None, print_blob=True)
# CI must not fail on a case that nobody changed: there the cases are the same on each run.
settings.register_profile("ci", parent=settings.get_profile("enforcer"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "enforcer")
