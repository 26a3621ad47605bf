"""`python -m gemmtuned` is the command `gemmtuned`."""

from gemmtuned.cli import main

if __name__ == "__main__":
    main()
