"""`python -m gatewise` is `gatewise`."""

from gatewise.cli import main

if __name__ == "__main__":
    main()
