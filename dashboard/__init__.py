"""dashboard: what a person looks at. For now, the learning curve of a finished run as a picture."""
