"""Read prompts and preferences from files in common formats, render them with the chat template,
and tokenise them."""
