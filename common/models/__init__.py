"""Model folders, tokenizers, images of prompts, and experts."""
