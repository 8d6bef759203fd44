"""python -m mvngrad: the command `mvngrad`."""

import sys

from mvngrad.cli import main

sys.exit(main())
