"""`python -m apfl` is `apfl`."""

from apfl.cli import main

if __name__ == "__main__":
    main()
