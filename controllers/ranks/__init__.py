"""Code that runs on a rank: execute tasks, read and write rows, reply to the driver."""
