"""``python -m expertctl``: the command ``expertctl`` of this interpreter."""

from expertctl.cli.app import main

if __name__ == "__main__":
    main()
