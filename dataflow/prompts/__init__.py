"""Reading data: files of prompts and preferences, the column names of other trainers' files, and the tokenizer that renders them."""
