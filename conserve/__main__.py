"""`python -m conserve`, and what the `conserve` script calls."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from conserve.cli.app import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
