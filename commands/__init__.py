"""The command `weft`, a module per command; `__main__.py` calls `command_line.main`.

command.py        what a command is: settings that tyro reads from the command line, and an answer
command_line.py   the tree of commands, exit codes, `--json`
run_folder.py     where a run lies

A command imports what it needs when it runs, so that `weft --help` loads neither torch nor Ray.
"""
