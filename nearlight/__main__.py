"""`python -m nearlight`: the command line."""

from nearlight.cli import main

if __name__ == "__main__":
    main()
