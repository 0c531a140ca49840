"""The command `maxsoftmax`, and what its subcommands do."""
