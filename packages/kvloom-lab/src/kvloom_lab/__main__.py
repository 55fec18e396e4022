"""`python -m kvloom_lab`."""

from .cli import main

if __name__ == "__main__":
    main()
