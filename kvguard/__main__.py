"""`python -m kvguard`: the same as the `kvguard` script."""

from kvguard.cli import main

if __name__ == "__main__":
    main()
