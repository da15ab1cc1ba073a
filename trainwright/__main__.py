"""`python -m trainwright` is the command `trainwright`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
