"""`python -m trainfast`."""

import sys

from trainfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
