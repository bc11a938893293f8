"""Read prompts and preferences from files in common formats, and render them with the tokenizer."""
