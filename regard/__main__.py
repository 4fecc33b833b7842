"""`python -m regard` is the command line."""

from regard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
