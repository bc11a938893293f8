"""The command `weft`. `__main__.py` calls `command_line.main`, which has the tree of commands.

Commands import what they need when they run, so that `weft --help` loads neither torch nor Ray.
"""
