"""`python -m hetjax` is the `hetjax` command."""

from hetjax.cli.main import main

if __name__ == "__main__":
    main()
