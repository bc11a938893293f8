"""Folders of Hugging Face models: settings, weight files, images, and copies on each node."""
