"""Code that runs on a rank: execute tasks, read and write rows, and reply to the driver."""
