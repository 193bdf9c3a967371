"""python -m enforcer."""

import sys

from enforcer.cli import main

sys.exit(main())
