"""`python -m selfspec`, which torchrun can start: the same as the script `selfspec`."""

from selfspec.cli import main

main()
