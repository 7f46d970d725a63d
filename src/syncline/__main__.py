"""``python -m syncline``: the command line without an installed script."""

from syncline_bench.cli import main

if __name__ == "__main__":
    main()
