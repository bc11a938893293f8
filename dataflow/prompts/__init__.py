"""Read prompts and preferences from common file formats, and render and tokenise them."""
