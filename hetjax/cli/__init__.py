"""The `hetjax` command; each subcommand is imported when it is first used."""
