"""`python -m kvloom`."""

from .cli import main

if __name__ == "__main__":
    main()
