"""`python -m fednorm` is the command `fednorm`."""

from fednorm.cli import main

if __name__ == "__main__":
    main()
