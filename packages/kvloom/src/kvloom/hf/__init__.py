"""How kvloom gets under a Hugging Face transformers model."""
