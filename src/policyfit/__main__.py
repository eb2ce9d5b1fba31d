"""``python -m policyfit``: the command line."""

import sys

from policyfit.trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
