"""``python -m cadence_fx``: the command line."""

from cadence_fx.cli import main

if __name__ == "__main__":
    main()
