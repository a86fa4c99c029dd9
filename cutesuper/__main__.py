"""``python -m cutesuper``: the command line."""

import sys

from cutesuper.cli import main

if __name__ == "__main__":
    sys.exit(main())
