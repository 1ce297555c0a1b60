"""``python -m fedweave`` is the ``fedweave`` command."""

import sys

from fedweave.cli import main

sys.exit(main())
