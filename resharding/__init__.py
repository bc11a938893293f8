"""Where weights live: how parameters lie over ranks, and how they get from one layout to another.

On the ground beside `dataflow`: the two do not know each other. Workers use it; controllers only say "update weights to
version v".
"""
