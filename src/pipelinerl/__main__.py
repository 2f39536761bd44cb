"""`python -m pipelinerl`: the `pipelinerl` command."""

import sys

from pipelinerl.cli import main

if __name__ == "__main__":
    sys.exit(main())
