"""`python -m rlctl`: the same as the command `rlctl`, also under torchrun."""

from rlctl.cli.app import main

if __name__ == "__main__":
    main()
