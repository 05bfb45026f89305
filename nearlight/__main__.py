"""`python -m nearlight`: the command line."""

from nearlight.cli import main

main()
