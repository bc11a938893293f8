"""The `weft` command. `command_line.main` parses the words of a command line and runs one command.

Each command imports its dependencies when it runs, so `weft --help` loads neither torch nor Ray.
"""
