"""`python -m tangram`: the command, where its script is not on the path."""

from tangram.cli import main

if __name__ == "__main__":
    main()
