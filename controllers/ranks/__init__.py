"""What happens on a rank: tasks come in, take turns, read and write rows, and are answered."""
