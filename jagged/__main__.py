"""`python -m jagged`: the command line without its script."""

from jagged.cli import main

if __name__ == "__main__":
    main()
