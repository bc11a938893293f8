"""The command `weft`, with a module per command. `__main__.py` calls `command_line.main`.

command.py        the base of commands: fields that tyro reads, and an answer
command_line.py   the tree of commands, exit codes, `--json`, shell completion

Commands import what they need when they run, so that `weft --help` loads neither torch nor Ray.
"""
