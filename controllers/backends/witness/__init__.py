"""What a node knows of the processes of ranks on it, seen from outside: where they stand, how they ended, and their memory.

witness.py          what is asked of a node
witnesses.py        asks the driver's node and the others
stacks.py           where a process stands, also one that hangs in C
exit_status.py      with which code or signal a process has ended
out_of_memory.py    whether memory ran out
memory.py           what processes and nodes take
"""
